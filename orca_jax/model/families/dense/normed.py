"""Families near Llama with other norms, and with factors or activations of their own."""

from dataclasses import replace

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import (
    ATTENTION_BIASES,
    BIASES,
    FACTORS,
    Fields,
    attention_biases,
    either,
    flag,
    number,
    number_or_none,
)
from orca_jax.model.families.names import POST_NORMS
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_float, get_optional_float, refusal
from orca_jax.model.families.windows import all_but_each, read_layer_types, windowed_rope, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RopeConfig

# Scaling and `rope_theta` outside the objects are those of layers without a window.
_GLOBAL = RopeRules(part="full_attention")
_LOCAL = RopeRules(theta_key=None, theta=5e5, part="sliding_attention")
OLMO2_FIELDS = (ATTENTION_BIASES, {"qk_norm": "all", "residual": "post_norm"})


def windows_of_exaone(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields for windows of an EXAONE. With windows, only layers that have one have a rope."""
    if hf.get("sliding_window", 4096) is None:
        read_layer_types(hf, config.num_layers, ("full_attention", "full_attention"))
        return {}
    # The pattern has no effect beside `layer_types`, and may then be a text.
    key: str | None = "sliding_window_pattern"
    if hf.get("layer_types") is not None:
        key = None
    found = windows(all_but_each(4, key))(hf, config)
    ropes = [None if window is None else config.rope for window in found["window"]]
    return {**found, "rope": tuple(ropes)}


def _nanochat(hf: HfConfig, config: ModelConfig) -> Fields:
    """Rotary positions that turn the other way."""
    assert config.rope is not None, "the shape has them"
    return {"rope": replace(config.rope, is_reversed=True)}


def hunyuan_rope(hf: HfConfig, config: ModelConfig) -> Fields:
    """Rotary positions of Hunyuan. A fixed `alpha` stretches the base, whatever the length of a text."""
    rope = config.rope
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    assert rope is not None, "the shape has them"
    if rope.kind != "dynamic" or get_optional_float(scaling, "alpha") is None:
        return {}
    if config.head_dim == 2:
        raise refusal("alpha", "needs heads of more than two dimensions", config.head_dim)
    stretch = get_float(scaling, "alpha") ** (config.head_dim / (config.head_dim - 2))
    return {"rope": RopeConfig(rope.theta * stretch)}


HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense",
    (ATTENTION_BIASES, hunyuan_rope, {"qk_norm": "head", "qk_norm_last": True}),
    "self_attn.{query,key}_layernorm attention.{query,key}_norm",
    shape=LlamaShape(rules=RopeRules(notes=frozenset({"alpha"}))),
    unread=(
        "add_classification_head class_num eod_token_id im_end_id im_newline_id im_start_id mask_init_id "
        "org_vocab_size pad_id pool_type text_end_id text_start_id"
    ),  # transformers does not read them
)
NORMED = (
    HUNYUAN_DENSE,
    Family(
        "olmo",
        (
            ATTENTION_BIASES,
            {
                "norm": "layernorm",
                "norm_scale": False,
                "attention_clip": number_or_none("clip_qkv"),
            },
        ),
        shape=LlamaShape(norm_key=None),
    ),
    Family("olmo2", OLMO2_FIELDS, POST_NORMS),
    Family(
        "olmo3",
        (*OLMO2_FIELDS, windows(all_but_each(4)), windowed_rope(_LOCAL)),
        POST_NORMS,
        shape=LlamaShape(rules=_GLOBAL),
    ),
    Family(
        "exaone4", (windows_of_exaone, {"residual": "post_norm", "qk_norm": "head"}), POST_NORMS
    ),
    Family("granite", (BIASES, FACTORS)),
    Family(
        "hyperclovax",
        (
            BIASES,
            FACTORS,
            {
                "attention_scale": number_or_none("attention_multiplier"),
                "logit_scale": number("logits_scaling"),  # logits are not divided by it
                "residual": either("use_post_norm", True, "both_norms", "pre_norm"),
            },
        ),
        "post_norm{1,2} {attention,mlp}_out_norm",
    ),
    Family("arcee", (BIASES, {"gated_mlp": False}), shape=LlamaShape(activation="relu2")),
    Family(
        "nemotron",
        (BIASES, {"norm": "layernorm", "norm_offset": 1.0, "gated_mlp": False}),
        shape=LlamaShape("norm_eps", "relu2", RopeRules(share=0.5)),
    ),
    Family(
        "jais2",
        (
            attention_biases(default=True),
            {"mlp_bias": flag("mlp_bias", True), "norm": "layernorm", "gated_mlp": False},
        ),
        shape=LlamaShape("layer_norm_eps", "relu2"),
    ),
    Family(
        "nanochat",
        (
            ATTENTION_BIASES,
            _nanochat,
            {
                "gated_mlp": False,
                "norm_scale": False,
                "embedding_norm": True,
                "qk_norm": "head",
                "qk_norm_last": True,
                "logit_soft_cap": number_or_none("final_logit_softcapping", 15.0),
            },
        ),
        "mlp.fc{1,2} mlp.{up,down}",
        shape=LlamaShape(activation="relu2"),
    ),
)
