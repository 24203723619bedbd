"""The supported families of checkpoints."""

from collections.abc import Mapping

from orca_jax.model.families.family import Family
from orca_jax.model.families.images.models import WRAPPERS
from orca_jax.model.families.texts import TEXTS

_WRAPPERS = {family.name: family for family in WRAPPERS}

FAMILIES: Mapping[str, Family] = {**TEXTS, **_WRAPPERS}
"""By `model_type` of config.json. A new family is a row of a table in a folder below."""
