"""The families of models for texts, by their `model_type`."""

from collections.abc import Mapping
from dataclasses import replace

from orca_jax.model.families.dense.gemma import GEMMAS
from orca_jax.model.families.dense.gemma4 import GEMMAS4
from orca_jax.model.families.dense.gpts import GPTS
from orca_jax.model.families.dense.llamas import LLAMAS
from orca_jax.model.families.dense.normed import NORMED
from orca_jax.model.families.dense.pairs import PAIRS
from orca_jax.model.families.family import Family
from orca_jax.model.families.mixtures.deepseek import LATENTS
from orca_jax.model.families.mixtures.gpt_oss import GPT_OSS
from orca_jax.model.families.mixtures.laguna import LAGUNA
from orca_jax.model.families.mixtures.llama4 import LLAMA4_TEXT
from orca_jax.model.families.mixtures.sigmoid import SIGMOIDS
from orca_jax.model.families.mixtures.softmax import SOFTMAX
from orca_jax.model.families.states.bamba import BAMBA
from orca_jax.model.families.states.falcon_h1 import FALCON_H1
from orca_jax.model.families.states.granite import GRANITES
from orca_jax.model.families.states.lfm import LFMS
from orca_jax.model.families.states.mamba2 import MAMBA2
from orca_jax.model.families.states.minimax import MINIMAX
from orca_jax.model.families.states.nemotron_h import NEMOTRON_H
from orca_jax.model.families.states.qwen_next import NEXTS
from orca_jax.model.families.states.zamba2 import ZAMBA2
from orca_jax.model.families.types import TYPES

_ALL = (
    *GPTS,
    *LLAMAS,
    *NORMED,
    *PAIRS,
    *GEMMAS,
    *GEMMAS4,
    *SOFTMAX,
    *SIGMOIDS,
    GPT_OSS,
    LLAMA4_TEXT,
    LAGUNA,
    *LATENTS,
    *GRANITES,
    *LFMS,
    MINIMAX,
    *NEXTS,
    MAMBA2,
    BAMBA,
    FALCON_H1,
    NEMOTRON_H,
    ZAMBA2,
)

_OWN = {family.name: family for family in _ALL}
_VARIANTS = {
    name: replace(_OWN[row.parent], name=name) for name, row in TYPES.items() if row.parent
}

TEXTS: Mapping[str, Family] = {**_OWN, **_VARIANTS}
