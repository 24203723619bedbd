"""Errors name the options without support in the decoder, and malformed values."""

from typing import Any

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.family import Family
from orca_jax.model.families.keys import FIXED
from orca_jax.values.errors import ConfigError
from tests.model.describe.options import (
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3_MOE,
)

LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("hf", "param"),
    [
        ({"model_type": "t5"}, "model"),
        ({}, "model"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "activation_function": "mish"}, "activation_function"),
        ({**GPT2, "n_head": 7}, "n_head"),
        ({**GPT2, "n_layer": 0}, "n_layer"),
        ({**GPT2, "n_layer": True}, "n_layer"),
        ({**GPT2, "n_layer": 10_001}, "n_layer"),
        ({**LLAMA, "num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({**QWEN2_MOE, "layer_types": [], "num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"model_type": "opt", "num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"model_type": "gpt_neox", "num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({**GPT2, "n_embd": "768"}, "n_embd"),
        ({**GPT2, "layer_norm_epsilon": -1}, "layer_norm_epsilon"),
        ({**GPT2, "eos_token_id": 50257}, "eos_token_id"),
        ({**GPT2, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**LLAMA, "hidden_act": "mish"}, "hidden_act"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": 100}, "num_attention_heads"),
        ({**LLAMA, "head_dim": 3}, "head_dim"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "su"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": ["linear"]}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "long_factor",
        ),
        (
            {
                **LLAMA,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                },
            },
            "short_factor",
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({**LLAMA, "is_causal": False}, "is_causal"),
        ({**GPT2, "is_causal": None}, "is_causal"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({**LLAMA, "per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
        (
            {**GPT2, "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config",
        ),
        ({**LLAMA, "quantization_config": {}}, "quantization_config"),
        ({**LLAMA, "quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({**GPT2, "architectures": "GPT2LMHeadModel"}, "architectures"),
        ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
        ({**GPT2, "auto_map": {"AutoConfig": "configuration_own.Own"}}, "auto_map"),
        ({**GPT2, "auto_map": ["configuration_own.Own"]}, "auto_map"),
        ({**GPT2, "num_key_value_heads": 1}, "num_key_value_heads"),
        ({**LLAMA, "logit_scale": 0.1}, "logit_scale"),
        (
            {
                **LLAMA,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1]},
            },
            "mrope_section",
        ),
        (
            {**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention",
        ),
        ({**GPT2, "n_layer": 3, "num_hidden_layers": 2}, "num_hidden_layers"),
        ({**QWEN2, "use_sliding_window": True, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**QWEN2, "layer_types": ["full_attention"] * 31}, "layer_types"),
        ({**QWEN2, "layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "layer_types"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({**QWEN2, "use_mrope": True}, "use_mrope"),
        ({**QWEN2, "attention_bias": False}, "attention_bias"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen3", "num_experts": 8}, "num_experts"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"model_type": "phi3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv"),
        ({**MIXTRAL, "mlp_only_layers": []}, "mlp_only_layers"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts"),
        ({**MIXTRAL, "routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ({**QWEN2_MOE, "use_sliding_window": True}, "use_sliding_window"),
        (
            {**QWEN2_MOE, "layer_types": ["full_attention"] * 23 + ["sliding_attention"]},
            "layer_types",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma2"}}, "text_config"),
        ({"model_type": "gemma3", "text_config": {"logit_scale": 2.0}}, "logit_scale"),
        ({"model_type": "gemma3", "text_config": {"head_dim": 3}}, "head_dim"),
        ({"model_type": "gemma3", "hidden_size": 2560}, "hidden_size"),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping",
        ),
        ({"model_type": "gemma3n", "head_dim": 256}, "model"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA2, "sliding_window": None}, "sliding_window"),
        ({**GEMMA2, "layer_types": ["sliding_attention"] * 25}, "layer_types"),
        ({**GEMMA2, "sliding_window_pattern": 2}, "sliding_window_pattern"),
        ({**GEMMA2, "rope_local_base_freq": 10000}, "rope_local_base_freq"),
        ({**GEMMA2, "hidden_activation": "mish"}, "hidden_activation"),
        ({**GEMMA2, "final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({**GEMMA2, "router_softcapping": 30.0}, "router_softcapping"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            {**GEMMA3, "sliding_window_pattern": 10**9, "num_hidden_layers": 10**9},
            "num_hidden_layers",
        ),
        ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({**GEMMA3, "rope_parameters": {"full_attention": 1}}, "rope_parameters"),
        (
            {
                **GEMMA3,
                "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}},
            },
            "rope_type",
        ),
        ({**GEMMA3, "rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({**GEMMA3, "rope_scaling": {"factor": 2.0, "layers": 3}}, "layers"),
        ({**GEMMA3, "layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.1}, "rotary_pct"),
        ({"model_type": "gpt_neox", "rope_theta": 5e5}, "rope_theta"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"model_type": "opt", "_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(hf: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as caught:
        config_from_hf(hf)
    assert caught.value.param == param


def test_unknown_keys_are_named_together_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"'num_layer', 'b'; .*did you mean 'n_layer'.*remove it"):
        config_from_hf({**GPT2, "num_layer": 2, "b": 1, "null counts as missing": None})
    with pytest.raises(ConfigError, match=r"and 995 more") as caught:
        config_from_hf({**LLAMA, **{"x" * 10**4 + str(i): i for i in range(1000)}})
    assert len(caught.value.message) < 1000


MALFORMED = [
    "1",
    "true",
    "false",
    "",
    [],
    [1],
    {},
    {"a": 1},
    float("nan"),
    float("inf"),
    -1,
    10**400,
    -(10**400),
    "NaN",
]
BOOLEANS = {
    "gating",
    "use_expert_bias",
    "attention_bias",
    "attention_k_eq_v",
    "attention_out_bias",
    "block_auto_adjust_ff_dim",
    "conv_bias",
    "enable_moe_block",
    "is_causal",
    "lm_head_bias",
    "mamba_conv_bias",
    "mamba_norm_before_gate",
    "mamba_proj_bias",
    "mamba_rms_norm",
    "mlp_bias",
    "multi_query",
    "mup_enabled",
    "norm_topk_prob",
    "projectors_bias",
    "qkv_bias",
    "rope_interleave",
    "scale_attn_weights",
    "scale_embedding",
    "tie_word_embeddings",
    "truncate",
    "use_attention_gate",
    "use_bias",
    "use_conv_bias",
    "use_double_wide_mlp",
    "use_parallel_residual",
    "use_post_norm",
    "use_qk_norm",
    "use_sandwich_norm",
    "use_sliding_window",
    "use_long_context",
    "use_mem_rope",
    "use_shared_attention_adapter",
}
COUNTS = {
    "first_k_dense_replace",
    "hidden_size_per_layer_input",
    "max_window_layers",
    "moe_layer_start_index",
    "moe_num_shared_experts",
    "moe_router_logit_softcapping",
    "n_shared_experts",
    "num_dense_layers",
    "num_kv_shared_layers",
    "num_local_experts",
    "rotary_dim",
    "shared_intermediate_size",
}
"""Keys with a meaning of 0."""
LISTS = (
    "attn_layer_indices",
    "full_attn_idxs",
    "mlp_only_layers",
    "moe_layers",
    "moe_topk",
    "num_experts",
)  # of numbers


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_malformed_values_are_refused_by_name(family: Family) -> None:
    """Values of another type are never converted, and never lead to an error of Python."""
    optional = {"per_layer_config", "rope_parameters", "rope_scaling", "text_config"}
    known = family.keys | family.fixed.keys() | FIXED.keys() | {"tie_word_embeddings"}
    for key in sorted(known - family.harmless):
        bad = [0, 1, 2.0] if key in BOOLEANS else [True, False, *([] if key in COUNTS else [0])]
        for value in [*MALFORMED, *bad]:
            without_effect = () if key in family.keys else FIXED.get(key, family.fixed.get(key, ()))
            is_list = key in LISTS and value == [1]
            is_last = key == "moe_layer_end_index" and value == -1
            # as without the key, in Llama 4 and SmolLM3
            is_list |= key == "no_rope_layers" and value == []
            is_last |= (
                key == "attn_temperature_tuning" and isinstance(value, int) and 0 <= value < 9
            )
            if value in without_effect or (key in optional and value == {}) or is_list or is_last:
                continue
            with pytest.raises(
                ConfigError, match=f"config.json.*{key}|{key}.*config.json"
            ) as caught:
                config_from_hf({"model_type": family.name, **family.needed, key: value})
            assert len(caught.value.message) < 400


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_malformed_rotary_positions_are_refused_by_name(kind: str) -> None:
    good: dict[str, Any] = {
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}),
        **(
            {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1, "truncate": True}
            if kind == "yarn"
            else {}
        ),
        **({"attention_factor": 1.0} if kind in ("yarn", "longrope") else {}),
        **({"short_factor": [1.0] * 64, "long_factor": [2.0] * 64} if kind == "longrope" else {}),
    }
    config_from_hf({**LLAMA, "rope_parameters": {"rope_type": kind, **good}})
    for key in good:
        bad = [0, 1, 2.0] if key == "truncate" else [True, False, 0]
        bad = [True, False] if "mscale" in key else bad
        for value in [*MALFORMED, *bad, [True] * 64, [0.0] * 64, [float("nan")] * 64, ["1"] * 64]:
            with pytest.raises(ConfigError, match=key):
                config_from_hf(
                    {**LLAMA, "rope_parameters": {"rope_type": kind, **good, key: value}}
                )


@pytest.mark.parametrize(
    ("rope", "param"),
    [
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.9},
            "high_freq_factor",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 8.0, "rope_theta": 1.0}, "rope_theta"),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 1, **LONG},
            "original_max_position_embeddings",
        ),
        ({"rope_type": 7}, "rope_type"),
        ({"rope_type": ["linear"]}, "rope_type"),
        ({"rope_type": None}, "rope_type"),
    ],
    ids=str,
)
def test_rotary_positions_without_a_meaning_are_refused(rope: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as caught:
        config_from_hf({**LLAMA, "rope_parameters": rope})
    assert caught.value.param == param
