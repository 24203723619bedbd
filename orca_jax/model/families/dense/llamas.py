"""Families that are a Llama with other defaults, biases or windows: CWM, InternLM 3, IQuest-Coder, Seed-OSS.

Apertus has an MLP without a gate, whose activation has parameters.
"""

from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, linear
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

_AS_LLAMA = ("LlamaForCausalLM", "LlamaModel")  # the classes that transformers has for these types
_APERTUS_ROPE = {
    **_CWM_ROPE,
    "rope_theta": 12e6,
    "factor": 8.0,
}
_APERTUS_NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
_XIELU = {"alpha_p": "positive", "alpha_n": "negative", "beta": "slope", "eps": "least"}
_SCALARS = ("beta", "eps")


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


def _apertus(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.attention_biases(hf),
        "activation": "xielu",
        "gated_mlp": False,
        "qk_norm": "head",
    }


def _of_apertus(config: ModelConfig) -> tuple[Weight, ...]:
    theirs = "layers.{layer}.mlp"
    activation = [
        Weight(f"{theirs}.act_fn.{name}", f"blocks.mlp.xielu.{ours}", is_scalar=name in _SCALARS)
        for name, ours in _XIELU.items()
    ]
    return (
        *llama.outer_weights(config, _APERTUS_NORMS),
        *llama.attention_weights(config),
        *linear(f"{theirs}.up_proj", "blocks.mlp.up", bias=False),
        *linear(f"{theirs}.down_proj", "blocks.mlp.down", bias=False),
        *activation,
    )


APERTUS = near_llama(
    "apertus",
    "Apertus 8B and 70B",
    "Apertus",
    LlamaShape(1e-5, activation_key=None, rules=RopeRules(theta=12e6, default=_APERTUS_ROPE)),
    _apertus,
    frozenset({"attention_bias"}),
    _of_apertus,
    fixed={"hidden_act": ("xielu", None)},
)
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
    architectures=(*_AS_LLAMA, "InternLM3ForCausalLM", "InternLM3Model"),
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUESTCODER = near_llama(
    "iquestcoder",
    "IQuest-Coder",
    "IQuestCoder",
    LlamaShape(1e-5),
    _biases,
    BIASES,
    architectures=(*_AS_LLAMA, "IQuestCoderForCausalLM", "IQuestCoderModel"),
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
