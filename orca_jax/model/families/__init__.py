"""The supported families of checkpoints."""

from collections.abc import Mapping

from orca_jax.model.families.family import Family
from orca_jax.model.families.images.models import WRAPPERS
from orca_jax.model.families.texts import TEXTS
from orca_jax.model.families.types import TYPES

_ALL = {**TEXTS, **{family.name: family for family in WRAPPERS}}

FAMILIES: Mapping[str, Family] = {name: _ALL[name] for name in TYPES if name in _ALL}
"""By `model_type` of config.json, in the order of `types.txt`."""
