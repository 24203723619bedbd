"""Families that rotate pairs of neighbours in each head: GLM, GLM-4, ERNIE 4.5, Helium, Command R and R7B.

Columns of queries and keys are put into another order while loading.
"""

from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import JoinedPart, Weight, linear, paired
from orca_jax.model.families.dense.near import LlamaShape, biases, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool, get_float, get_int
from orca_jax.model.families.windows import windows_of_gemma
from orca_jax.values.config import ModelConfig

_GLM_SHAPE = LlamaShape(1.5625e-07, rules=RopeRules(share=0.5))
_GLM4_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_BIAS = frozenset({"attention_bias"})


def _of_glm(config: ModelConfig, norms: dict[str, str] | None = None) -> tuple[Weight, ...]:
    mlp = "layers.{layer}.mlp"
    sizes = (config.mlp_dim,) * 2
    joined = [
        Weight(
            f"{mlp}.gate_up_proj.weight",
            f"blocks.mlp.{name}.kernel",
            transpose=True,
            part=JoinedPart(index, sizes),
        )
        for index, name in enumerate(("gate", "up"))
    ]
    return (
        *llama.outer_weights(config, norms),
        *paired(llama.attention_weights(config), config),
        *joined,
        *linear(f"{mlp}.down_proj", "blocks.mlp.down", bias=False),
    )


def _of_llama(config: ModelConfig) -> tuple[Weight, ...]:
    return paired(llama.weights(config), config)


def _of_cohere(config: ModelConfig) -> tuple[Weight, ...]:
    """One norm for the inputs of attention and MLP is in both."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "input_layernorm"}
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    return (
        *llama.outer_weights(config, norms),
        *paired(llama.attention_weights(config), config),
        *mlp,
    )


def _glm(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": get_bool(hf, "attention_bias", True)}


def _glm4(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**_glm(hf, config), "residual": "both_norms"}


def _ernie(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    bias = get_bool(hf, "use_bias", False)
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bias}


def _helium(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**biases(hf), "attention_out_bias": False}


def _cohere(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.attention_biases(hf),
        "norm": "layernorm",
        "norm_bias": False,
        "residual": "parallel",
        "logit_scale": get_float(hf, "logit_scale", 0.0625),
    }


def _cohere2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Layers without a window have no rope."""
    period = get_int(hf, "sliding_window_pattern", 4)
    windows = windows_of_gemma(hf, config.num_layers, config.max_positions, period)
    return {**_cohere(hf, config), **windows._asdict(), "rope_pattern": windows.window_pattern}


GLM = near_llama(
    "glm", "GLM-4 9B of 2024 in the form of transformers", "Glm", _GLM_SHAPE, _glm, _BIAS, _of_glm
)
GLM4 = near_llama(
    "glm4",
    "GLM-4 0414, GLM-Z1",
    "Glm4",
    _GLM_SHAPE,
    _glm4,
    _BIAS,
    lambda config: _of_glm(config, _GLM4_NORMS),
)
ERNIE4_5 = near_llama(
    "ernie4_5",
    "ERNIE 4.5 0.3B",
    "Ernie4_5",
    LlamaShape(1e-5, rules=RopeRules(theta=5e5), is_tied=True),
    _ernie,
    frozenset({"use_bias"}),
    _of_llama,
)
HELIUM = near_llama(
    "helium",
    "Helium 1",
    "Helium",
    LlamaShape(1e-8, rules=RopeRules(theta=1e5)),
    _helium,
    frozenset({"attention_bias", "mlp_bias"}),
    _of_llama,
)
COHERE = near_llama(
    "cohere",
    "Command R",
    "Cohere",
    LlamaShape(1e-5, "layer_norm_eps", rules=RopeRules(theta=5e5), is_tied=True),
    _cohere,
    frozenset({"attention_bias", "logit_scale"}),
    _of_cohere,
    fixed={"use_qk_norm": (False, None)},
)
COHERE2 = near_llama(
    "cohere2",
    "Command R7B, Command A, Aya Expanse",
    "Cohere2",
    LlamaShape(1e-5, "layer_norm_eps", is_tied=True),
    _cohere2,
    frozenset(
        {"attention_bias", "layer_types", "logit_scale", "sliding_window", "sliding_window_pattern"}
    ),
    _of_cohere,
    fixed={"use_qk_norm": (False, None)},
    harmless=frozenset({"cache_implementation"}),
)
PAIRS = (GLM, GLM4, ERNIE4_5, HELIUM, COHERE, COHERE2)
