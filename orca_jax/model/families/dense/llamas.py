"""Families that are a Llama with other defaults, biases or windows: CWM, InternLM 3, IQuest-Coder, Seed-OSS."""

from typing import Any

from orca_jax.model.families.dense.near import BIASES, LlamaShape, biases, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.model.families.windows import windows_of_pattern
from orca_jax.values.config import ModelConfig

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def _cwm(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    windows = windows_of_pattern(
        hf, config.num_layers, config.max_positions, (False, True, True, True), 8192
    )
    return {"mlp_bias": get_bool(hf, "mlp_bias", False), **windows._asdict()}


def _biases(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return biases(hf)


def _seed_oss(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": get_bool(hf, "attention_bias", True),
        "attention_out_bias": get_bool(hf, "attention_out_bias", False),
        "mlp_bias": get_bool(hf, "mlp_bias", False),
    }


CWM = near_llama(
    "cwm",
    "CWM",
    "Cwm",
    LlamaShape(1e-5, rules=RopeRules(theta=1e6, default=_CWM_ROPE)),
    _cwm,
    frozenset({"mlp_bias", "layer_types", "sliding_window"}),
)
INTERNLM3 = near_llama(
    "internlm3",
    "InternLM 3",
    "InternLM3",
    LlamaShape(1e-5),
    _biases,
    BIASES,
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUESTCODER = near_llama(
    "iquestcoder",
    "IQuest-Coder",
    "IQuestCoder",
    LlamaShape(1e-5),
    _biases,
    BIASES,
    fixed={"clip_qkv": (None,)},
    harmless=frozenset({"max_window_layers"}),  # of windows, which are refused
)
SEED_OSS = near_llama(
    "seed_oss",
    "Seed-OSS",
    "SeedOss",
    LlamaShape(),
    _seed_oss,
    BIASES | {"attention_out_bias"},
    harmless=frozenset({"residual_dropout"}),
)
