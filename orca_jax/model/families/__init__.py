"""The supported families of checkpoints."""

from collections.abc import Mapping

from orca_jax.model.families.base import Family
from orca_jax.model.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from orca_jax.model.families.gpt2 import GPT2
from orca_jax.model.families.gpt_neox import GPT_NEOX
from orca_jax.model.families.llama import LLAMA
from orca_jax.model.families.mistral import MISTRAL
from orca_jax.model.families.olmo2 import OLMO2
from orca_jax.model.families.opt import OPT
from orca_jax.model.families.phi3 import PHI3
from orca_jax.model.families.qwen import QWEN2, QWEN3

_ALL = (GPT2, LLAMA, QWEN2, MISTRAL, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3_TEXT, GEMMA3, GPT_NEOX, OPT)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
"""By `model_type` of config.json. A new family is a new file here."""
