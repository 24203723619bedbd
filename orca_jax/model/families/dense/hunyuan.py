"""Hunyuan: Qwen3 with norms of queries and keys after their rotation, and a stretched base of rotary positions."""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_float, get_optional_float, refusal
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RopeConfig

HUNYUAN_SHAPE = LlamaShape(1e-5, rules=RopeRules(notes=frozenset({"alpha"})))
HUNYUAN_HARMLESS = words(
    "add_classification_head class_num eod_token_id im_end_id im_newline_id im_start_id mask_init_id org_vocab_size "
    "pad_id pool_type text_end_id text_start_id"
)
"""Keys that transformers does not read."""


def hunyuan_fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields that differ from Llama's. A fixed `alpha` stretches the base, whatever the length of a text."""
    rope = config.rope
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    assert rope is not None, "read_shape reads them"
    if rope.kind == "dynamic" and get_optional_float(scaling, "alpha") is not None:
        if config.head_dim == 2:
            raise refusal("alpha", "needs heads of more than two dimensions", config.head_dim)
        rope = RopeConfig(
            rope.theta * get_float(scaling, "alpha") ** (config.head_dim / (config.head_dim - 2))
        )
    return {**llama.attention_biases(hf), "rope": rope, "qk_norm": "head", "qk_norm_last": True}


def attention_of_hunyuan(config: ModelConfig) -> tuple[Weight, ...]:
    """All weights but those of the MLPs."""
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    rows = llama.weights_beside_mlp(config)
    for old, new in names.items():
        rows = tuple(replace(row, key=row.key.replace(f".{old}.", f".{new}.")) for row in rows)
    return rows


def _weights(config: ModelConfig) -> tuple[Weight, ...]:
    mlp = llama.mlp_weights("layers.{layer}.mlp", "blocks.mlp", bias=False)
    return *attention_of_hunyuan(config), *mlp


HUNYUAN_V1_DENSE = near_llama(
    "hunyuan_v1_dense",
    "Hunyuan 0.5B to 7B",
    "HunYuanDenseV1",
    HUNYUAN_SHAPE,
    hunyuan_fields,
    frozenset({"attention_bias"}),
    _weights,
    harmless=HUNYUAN_HARMLESS,
)
