"""The supported families of checkpoints."""

from collections.abc import Mapping

from orca_jax.model.families.base import Family
from orca_jax.model.families.gpt2 import GPT2
from orca_jax.model.families.llama import LLAMA

FAMILIES: Mapping[str, Family] = {family.name: family for family in (GPT2, LLAMA)}
"""By `model_type` of config.json. A new family is a new file here."""
