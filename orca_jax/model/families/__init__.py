"""The supported families of checkpoints."""

from collections.abc import Mapping
from dataclasses import replace

from orca_jax.model.families.base import Family
from orca_jax.model.families.dense.biased_heads import BIASED_HEADS
from orca_jax.model.families.dense.gemma4 import GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from orca_jax.model.families.dense.gpts import BIOGPT, GPT_BIGCODE, GPT_NEO, STARCODER2
from orca_jax.model.families.dense.hunyuan import HUNYUAN_V1_DENSE
from orca_jax.model.families.dense.llamas import APERTUS, CWM, INTERNLM3, IQUESTCODER, SEED_OSS
from orca_jax.model.families.dense.pairs import PAIRS
from orca_jax.model.families.dense.partly_rotated import PARTLY_ROTATED
from orca_jax.model.families.dense.scaled import SCALED
from orca_jax.model.families.dense.unweighted import NANOCHAT, OLMO
from orca_jax.model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT, VAULTGEMMA
from orca_jax.model.families.gpt2 import GPT2
from orca_jax.model.families.gpt_neox import GPT_NEOX
from orca_jax.model.families.images.models import WRAPPERS
from orca_jax.model.families.llama import LLAMA
from orca_jax.model.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from orca_jax.model.families.mixtures.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    YOUTU,
)
from orca_jax.model.families.mixtures.gpt_oss import GPT_OSS
from orca_jax.model.families.mixtures.laguna import LAGUNA
from orca_jax.model.families.mixtures.llama4 import LLAMA4_TEXT
from orca_jax.model.families.mixtures.mistral4 import MISTRAL4
from orca_jax.model.families.mixtures.mixtral import MIXTRAL
from orca_jax.model.families.mixtures.near_qwen import NEAR_QWEN
from orca_jax.model.families.mixtures.other_sigmoid import OTHER_SIGMOID
from orca_jax.model.families.mixtures.qwen_moe import QWEN2_MOE, QWEN3_MOE
from orca_jax.model.families.mixtures.sigmoid import SIGMOID
from orca_jax.model.families.mixtures.softmax import SOFTMAX
from orca_jax.model.families.olmo import FLEX_OLMO, OLMO2, OLMO3, OLMOE
from orca_jax.model.families.opt import OPT
from orca_jax.model.families.phi3 import PHI3
from orca_jax.model.families.qwen import QWEN2, QWEN3
from orca_jax.model.families.states.bamba import BAMBA
from orca_jax.model.families.states.falcon_h1 import FALCON_H1
from orca_jax.model.families.states.granite import GRANITES
from orca_jax.model.families.states.lfm import LFM2, LFM2_MOE, LFM3
from orca_jax.model.families.states.mamba2 import MAMBA2
from orca_jax.model.families.states.minimax import MINIMAX
from orca_jax.model.families.states.nemotron_h import NEMOTRON_H
from orca_jax.model.families.states.qwen_next import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT

_DENSE = (
    GPT2,
    LLAMA,
    QWEN2,
    MISTRAL,
    QWEN3,
    PHI3,
    OLMO2,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA3,
    GPT_NEOX,
    OPT,
)
_NEAR = (
    GEMMA,
    VAULTGEMMA,
    OLMO3,
    MINISTRAL,
    SEED_OSS,
    STARCODER2,
    GPT_BIGCODE,
    GPT_NEO,
    BIOGPT,
    CWM,
    INTERNLM3,
)
_WITH_EXPERTS = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    FLEX_OLMO,
    *SIGMOID,
    *SOFTMAX,
    GPT_OSS,
    LLAMA4_TEXT,
    LAGUNA,
    *OTHER_SIGMOID,
    *GRANITES,
    *NEAR_QWEN,
)
_WITH_LATENTS = (
    YOUTU,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MISTRAL4,
    replace(DEEPSEEK_V3, name="kimi_k2", models="Kimi K2"),
)
_WITH_STATES = (
    LFM2,
    LFM2_MOE,
    LFM3,
    MINIMAX,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    MAMBA2,
    BAMBA,
    FALCON_H1,
    NEMOTRON_H,
)

_ALL = (
    *_DENSE,
    *_NEAR,
    IQUESTCODER,
    APERTUS,
    OLMO,
    NANOCHAT,
    MINISTRAL3,
    HUNYUAN_V1_DENSE,
    GEMMA4_TEXT,
    GEMMA4_UNIFIED_TEXT,
    *SCALED,
    *PAIRS,
    *PARTLY_ROTATED,
    *BIASED_HEADS,
    *_WITH_EXPERTS,
    *_WITH_LATENTS,
    *_WITH_STATES,
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (*_ALL, *WRAPPERS)}
"""By `model_type` of config.json. A new family is a new file in a folder below, and a row here."""
