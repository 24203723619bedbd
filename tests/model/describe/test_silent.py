"""What would be wrong in silence: keys and defaults of families in which a plain reading gives another model."""

from typing import Any

import pytest

from orca_jax.model.describe import config_from_hf, refused
from orca_jax.model.families import FAMILIES
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


def read(kind: str, **options: Any) -> ModelConfig:
    return config_from_hf(
        {"model_type": kind, "num_hidden_layers": 8, "max_position_embeddings": 8192, **options}
    )


def ropes(config: ModelConfig) -> list[bool]:
    """Whether each layer has rotary positions."""
    return [kind.rope is not None for kind in config.layers]


def windows(config: ModelConfig) -> list[bool]:
    """Whether each layer has a window."""
    return [kind.window is not None for kind in config.layers]


def test_eps_of_biogpt_is_not_read() -> None:
    assert read("biogpt", layer_norm_eps=0.5) == read("biogpt", layer_norm_eps=1e-12)
    assert read("biogpt").norm_eps == 1e-5


def test_granite_divides_logits_and_hyperclovax_multiplies_them() -> None:
    assert read("granite", logits_scaling=8.0).logit_scale == 1 / 8
    assert read("hyperclovax", logits_scaling=8.0).logit_scale == 8.0
    assert read("granite").score_scale == 1.0, "not a root of the head's width"
    assert read("hyperclovax").score_scale == 128**-0.5


def test_layers_without_positions() -> None:
    every_fourth = [True, True, True, False] * 2
    assert ropes(read("smollm3")) == every_fourth
    assert ropes(read("smollm3", no_rope_layers=[1, 0] * 4)) == [True, False] * 4, (
        "1 is a layer with positions"
    )
    assert (
        ropes(read("exaone4", sliding_window=64))
        == every_fourth
        == windows(read("exaone4", sliding_window=64))
    )
    assert ropes(read("exaone4", sliding_window=None)) == [True] * 8
    assert ropes(read("cohere2", sliding_window=64)) == every_fourth
    assert ropes(read("cohere2", sliding_window=8192)) == every_fourth, (
        "a window without an effect is one all the same"
    )
    assert ropes(read("cwm", sliding_window=64)) == [True] * 8
    assert windows(read("cwm", sliding_window=64)) == [False, True, True, True] * 2
    assert ropes(read("dots1", layer_types=[FULL, SLIDING] * 4)) == [True] * 8


def test_llama4_is_served_up_to_the_tokens_from_which_attention_is_another() -> None:
    """Chunks of rotated layers begin again at `attention_chunk_size`, the temperature of others changes before it."""
    limit = "max_position_embeddings"
    published = {
        limit: 10485760,
        "attn_temperature_tuning": 4,
        "no_rope_layers": [],
        "for_llm_compression": False,
    }
    assert read("llama4_text", **published).max_positions == 8191
    assert ropes(read("llama4_text")) == [True, True, True, False] * 2
    assert read("llama4_text", **{limit: 9000}, attn_temperature_tuning=False).max_positions == 8192
    assert read("llama4_text", **{limit: 9000}, no_rope_layers=[1] * 8).max_positions == 8192
    assert read("llama4_text", **{limit: 64}, attention_chunk_size=16).max_positions == 16
    assert (
        read("llama4_text", **{limit: 64}, attention_chunk_size=None, floor_scale=32).max_positions
        == 31
    )
    config = read("llama4_text", interleave_moe_layer_step=2, intermediate_size_mlp=24)
    assert (config.layers_with("dense_mlp"), config.dense_mlp_dim) == ((0, 2, 4, 6), 24)


def test_a_theta_of_olmo3_outside_the_objects_is_that_of_full_layers() -> None:
    config = read("olmo3", rope_theta=1e4)
    thetas = [kind.rope.theta for kind in config.layers if kind.rope is not None]
    assert thetas == [5e5, 5e5, 5e5, 1e4] * 2


def test_scales_of_scores() -> None:
    assert read("gpt_neo", num_layers=8, attention_types=[[["global"], 8]]).score_scale == 1.0
    assert read("gpt_bigcode", scale_attn_weights=False).score_scale == 1.0
    assert read("gpt_bigcode").num_kv_heads == 1


def test_gelu_of_gemma_is_an_approximation() -> None:
    assert read("gemma", hidden_act="gelu").activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm"),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "olmo", "clip_qkv": -8.0}, "clip_qkv"),
        ({"model_type": "olmo", "rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"model_type": "apertus", "hidden_act": "silu"}, "hidden_act"),
        ({"model_type": "gemma4_unified_text", "enable_moe_block": True}, "enable_moe_block"),
        ({"model_type": "mistral4", "rope_parameters": {"rope_type": "default"}}, "rope_type"),
        ({"model_type": "mistral4", "head_dim": 64}, "head_dim"),
        (
            {"model_type": "laguna", "num_attention_heads_per_layer": [48, 64] * 20},
            "heads_per_layer",
        ),
        ({"model_type": "laguna", "mlp_only_layers": [0, 1]}, "mlp_only_layers"),
        ({"model_type": "laguna", "gating_types": ["per_element"] * 40}, "gating_types"),
        ({"model_type": "laguna", "gating": False}, "gating"),
        (
            {
                "model_type": "laguna",
                "partial_rotary_factor": 0.5,
                "rope_parameters": {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e4}},
            },
            "partial_rotary_factor",
        ),
        ({"model_type": "qwen3_5_text", "output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"model_type": "glm4_moe", "head_dim": 128, "n_group": 3}, "n_group"),
        (
            {"model_type": "glm4_moe", "head_dim": 128, "first_k_dense_replace": 46},
            "first_k_dense_replace",
        ),
        ({"model_type": "internvl", "text_config": {"model_type": "gpt_oss"}}, "text_config"),
        ({"model_type": "internvl", "text_config": {"model_type": ["llama"]}}, "text_config"),
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"model_type": "llama4_text", "moe_layers": [48]}, "moe_layers"),
        ({"model_type": "llama4_text", "no_rope_layers": [0] * 48}, "no_rope_layers"),
        (
            {"model_type": "llama4_text", "interleave_moe_layer_step": 49},
            "interleave_moe_layer_step",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "attn_scale": 2.0}},
            "attn_scale",
        ),
    ],
    ids=str,
)
def test_options_without_support_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        config_from_hf(options)


def test_a_refusal_names_the_nearest_family_and_the_missing_part() -> None:
    assert {near for near, _ in refused().values()} <= FAMILIES.keys()
    with pytest.raises(
        ConfigError,
        match=r"'mpt' is not supported \(ALiBi is missing; the nearest family is gpt2\)",
    ):
        config_from_hf({"model_type": "mpt"})
