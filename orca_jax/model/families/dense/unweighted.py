"""Families whose norms have no weights: OLMo 1 and nanochat."""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, head, linear
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.values import HfConfig, get_optional_float
from orca_jax.values.config import ModelConfig

_LOGIT_CAP = "final_logit_softcapping"


def _olmo(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.attention_biases(hf),
        "norm": "layernorm",
        "norm_scale": False,
        "attention_clip": get_optional_float(hf, "clip_qkv"),
    }


def _nanochat(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """Heads are normalised after their rotation, which turns the other way."""
    assert config.rope is not None, "read_shape reads them"
    return {
        **llama.attention_biases(hf),
        "gated_mlp": False,
        "norm_scale": False,
        "embedding_norm": True,
        "qk_norm": "head",
        "qk_norm_last": True,
        "rope": replace(config.rope, is_reversed=True),
        "logit_soft_cap": get_optional_float(hf, _LOGIT_CAP, 15.0),
    }


def _of_nanochat(config: ModelConfig) -> tuple[Weight, ...]:
    mlp = "layers.{layer}.mlp"
    return (
        Weight("embed_tokens.weight", "embedding.table"),
        *llama.attention_weights(config),
        *linear(f"{mlp}.fc1", "blocks.mlp.up", bias=False),
        *linear(f"{mlp}.fc2", "blocks.mlp.down", bias=False),
        *head(config),
    )


OLMO = near_llama(
    "olmo",
    "OLMo 1",
    "Olmo",
    LlamaShape(1e-5, norm_key=None),
    _olmo,
    frozenset({"attention_bias", "clip_qkv"}),
)
NANOCHAT = near_llama(
    "nanochat",
    "nanochat",
    "NanoChat",
    LlamaShape(activation="relu2"),
    _nanochat,
    frozenset({"attention_bias", _LOGIT_CAP}),
    _of_nanochat,
)
