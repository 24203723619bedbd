"""The supported families of checkpoints."""

from collections.abc import Mapping

from orca_jax.model.families.base import Family
from orca_jax.model.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from orca_jax.model.families.gpt2 import GPT2
from orca_jax.model.families.gpt_neox import GPT_NEOX
from orca_jax.model.families.lfm3 import LFM3
from orca_jax.model.families.llama import LLAMA
from orca_jax.model.families.minimax import MINIMAX
from orca_jax.model.families.mistral import MISTRAL
from orca_jax.model.families.mixtral import MIXTRAL
from orca_jax.model.families.olmo import OLMO2, OLMOE
from orca_jax.model.families.opt import OPT
from orca_jax.model.families.phi3 import PHI3
from orca_jax.model.families.qwen import QWEN2, QWEN3
from orca_jax.model.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

_DENSE = (GPT2, LLAMA, QWEN2, MISTRAL, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3_TEXT, GEMMA3, GPT_NEOX, OPT)
_WITH_EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE)
_WITH_STATES = (LFM3, MINIMAX)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (*_DENSE, *_WITH_EXPERTS, *_WITH_STATES)}
"""By `model_type` of config.json. A new family is a new file here."""
