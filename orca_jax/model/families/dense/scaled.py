"""Families whose parts have factors: Granite 3, HyperCLOVA X; and those with squared ReLU: Arcee, Nemotron, Jais 2."""

from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight
from orca_jax.model.families.dense.near import (
    BIASES,
    LlamaShape,
    biases,
    near_llama,
    plain_mlp_weights,
)
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool, get_float, get_optional_float
from orca_jax.values.config import ModelConfig

FACTORS = frozenset(
    {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
)


def granite_factors(hf: HfConfig) -> dict[str, Any]:
    """The fields for the factors of Granite. Logits are divided by theirs."""
    return {
        "attention_scale": get_float(hf, "attention_multiplier", 1.0),
        "embedding_scale": get_float(hf, "embedding_multiplier", 1.0),
        "logit_scale": 1 / get_float(hf, "logits_scaling", 1.0),
        "residual_scale": get_float(hf, "residual_multiplier", 1.0),
    }


def _hyperclovax(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Logits are multiplied by their factor, unlike those of Granite."""
    has_both = get_bool(hf, "use_post_norm", True)
    return {
        **biases(hf),
        **granite_factors(hf),
        "attention_scale": get_optional_float(hf, "attention_multiplier"),
        "logit_scale": get_float(hf, "logits_scaling", 1.0),
        "residual": "both_norms" if has_both else "pre_norm",
    }


def _hyperclovax_weights(config: ModelConfig) -> tuple[Weight, ...]:
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.residual == "both_norms":
        names |= {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=config.mlp_bias)
    return *llama.outer_weights(config, names), *llama.attention_weights(config), *mlp


def _nemotron(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**biases(hf), "norm": "layernorm", "norm_offset": 1.0, "gated_mlp": False}


def _jais2(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    bias = get_bool(hf, "attention_bias", True)
    own = {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": get_bool(hf, "mlp_bias", True),
    }
    return {**own, "norm": "layernorm", "gated_mlp": False}


GRANITE = near_llama(
    "granite",
    "Granite 3",
    "Granite",
    LlamaShape(),
    lambda hf, config: {**biases(hf), **granite_factors(hf)},
    BIASES | FACTORS,
)
HYPERCLOVAX = near_llama(
    "hyperclovax",
    "HyperCLOVA X SEED",
    "HyperCLOVAX",
    LlamaShape(),
    _hyperclovax,
    BIASES | FACTORS | {"use_post_norm"},
    _hyperclovax_weights,
)
ARCEE = near_llama(
    "arcee",
    "AFM 4.5B",
    "Arcee",
    LlamaShape(1e-5, activation="relu2"),
    lambda hf, config: {**biases(hf), "gated_mlp": False},
    BIASES,
    plain_mlp_weights,
)
NEMOTRON = near_llama(
    "nemotron",
    "Nemotron 3 and 4, Minitron",
    "Nemotron",
    LlamaShape(1e-5, "norm_eps", "relu2", RopeRules(share=0.5)),
    _nemotron,
    BIASES,
    plain_mlp_weights,
)
JAIS2 = near_llama(
    "jais2",
    "Jais 2",
    "Jais2",
    LlamaShape(1e-5, "layer_norm_eps", "relu2"),
    _jais2,
    BIASES,
    plain_mlp_weights,
)
SCALED = (GRANITE, HYPERCLOVAX, ARCEE, NEMOTRON, JAIS2)
