"""Configurations are read without JAX, and errors name the options without support in the decoder."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import RopeConfig
from orca_jax.errors import ConfigError
from orca_jax.model.describe import config_from_hf, preset_names, read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Family
from orca_jax.model.families.keys import FIXED, HARMLESS, SHARED
from orca_jax.model.stages import LayerSpan, of_span
from tests.model.page import PAGE, page
from tests.project.source import ROOT

# name: layers, embed, heads, KV heads, MLP, vocabulary, positions
PRESETS = {
    "gpt2-tiny": (2, 64, 2, 2, 256, 512, 1024),
    "gpt2": (12, 768, 12, 12, 3072, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 16, 4096, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 20, 5120, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 25, 6400, 50257, 1024),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, 131072),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, 8192),
    "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 32768),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 768, 151936, 40960),
    "gpt3-13b": (40, 5120, 40, 40, 20480, 50257, 2048),
    "gpt3-101b": (80, 10240, 80, 80, 40960, 50257, 2048),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 50257, 2048),
    "gpt3-341b": (120, 15360, 120, 120, 61440, 50257, 2048),
}

GPT2: dict[str, Any] = {"model_type": "gpt2"}
LLAMA: dict[str, Any] = {"model_type": "llama"}
QWEN2: dict[str, Any] = {"model_type": "qwen2"}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral"}
QWEN2_MOE: dict[str, Any] = {"model_type": "qwen2_moe"}
QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe"}
GEMMA2: dict[str, Any] = {"model_type": "gemma2"}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text"}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
HUB: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/fixtures/configs/hub.json").read_text(encoding="utf-8"))


def test_presets() -> None:
    assert set(preset_names()) == set(PRESETS)
    for name, shape in PRESETS.items():
        c = read_model_config(f"preset:{name}")
        sizes = (c.num_layers, c.embed_dim, c.num_heads, c.num_kv_heads, c.mlp_dim, c.vocab_size, c.max_positions)
        assert sizes == shape, name
        assert c.head_dim * c.num_heads == c.embed_dim or name == "qwen3-30b-a3b", name


def test_describing_a_model_imports_no_jax() -> None:
    code = (
        "import sys, orca_jax.model.describe as d; d.read_model_config('preset:gpt2');"
        "print([m for m in ('jax', 'flax', 'numpy', 'orbax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
        ({**GPT2, "n_embd": "768"}, "n_embd"),
        ({**GPT2, "layer_norm_epsilon": -1}, "layer_norm_epsilon"),
        ({**GPT2, "eos_token_id": 50257}, "eos_token_id"),
        ({**GPT2, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**LLAMA, "hidden_act": "relu2"}, "hidden_act"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": 100}, "num_attention_heads"),
        ({**LLAMA, "head_dim": 3}, "head_dim"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"type": "su"}}, "rope_type"),
        ({**LLAMA, "rope_scaling": ["linear"]}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ({**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "is_causal": False}, "is_causal"),
        ({**GPT2, "is_causal": None}, "is_causal"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({**LLAMA, "per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
        ({**GPT2, "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({**LLAMA, "quantization_config": {}}, "quantization_config"),
        ({**LLAMA, "quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({**GPT2, "architectures": "GPT2LMHeadModel"}, "architectures"),
        ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
        ({**GPT2, "auto_map": {"AutoConfig": "configuration_own.Own"}}, "auto_map"),
        ({**GPT2, "auto_map": ["configuration_own.Own"]}, "auto_map"),
        ({**GPT2, "num_key_value_heads": 1}, "num_key_value_heads"),
        ({**LLAMA, "logit_scale": 0.1}, "logit_scale"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
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
        ({**QWEN2_MOE, "layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "layer_types"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma2"}}, "text_config"),
        ({"model_type": "gemma3", "text_config": {"logit_scale": 2.0}}, "logit_scale"),
        ({"model_type": "gemma3", "text_config": {"head_dim": 3}}, "head_dim"),
        ({"model_type": "gemma3", "hidden_size": 2560}, "hidden_size"),
        ({"model_type": "gemma", "head_dim": 256}, "model"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA2, "sliding_window": None}, "sliding_window"),
        ({**GEMMA2, "layer_types": ["sliding_attention"] * 25}, "layer_types"),
        ({**GEMMA2, "sliding_window_pattern": 2}, "sliding_window_pattern"),
        ({**GEMMA2, "rope_local_base_freq": 10000}, "rope_local_base_freq"),
        ({**GEMMA2, "hidden_activation": "mish"}, "hidden_activation"),
        ({**GEMMA2, "final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({**GEMMA2, "router_softcapping": 30.0}, "router_softcapping"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA3, "sliding_window_pattern": 10**9, "num_hidden_layers": 10**9}, "sliding_window_pattern"),
        ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({**GEMMA3, "rope_parameters": {"full_attention": 1}}, "rope_parameters"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope_type"),
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


def test_windows() -> None:
    """The rules of transformers: which key decides, and which values mean no window."""

    def window(family: str, **options: object) -> int | None:
        return config_from_hf({"model_type": family, "max_position_embeddings": 8192, **options}).sliding_window

    assert window("mistral") == 4096
    assert window("mistral", sliding_window=None) is None
    assert window("mistral", sliding_window=8192) is None, "no token is that far away"
    assert window("qwen2") is None
    for used, first, kinds, expected in (
        (True, 0, None, 64),
        (True, 32, None, None),
        (False, 0, None, None),
        (True, 0, ["full_attention"] * 32, None),
        (True, 28, ["sliding_attention"] * 32, 64),
    ):
        options = {"use_sliding_window": used, "max_window_layers": first, "layer_types": kinds}
        assert window("qwen3", sliding_window=64, **options) == expected
    assert window("qwen3_moe", sliding_window=64) is None
    assert window("qwen3_moe", sliding_window=64, use_sliding_window=True, max_window_layers=48) == 64
    assert window("qwen2_moe", sliding_window=64) is None
    assert window("phi3") is None
    assert window("phi3", sliding_window=2047) == 2047


def test_some_layers_have_a_window() -> None:
    """The pattern of transformers; layers that it gives no window see all tokens."""

    def windows(family: str, **options: object) -> list[int | None]:
        sizes = {"num_hidden_layers": 5, "max_position_embeddings": 8192, "sliding_window": 64}
        config = config_from_hf({"model_type": family, **sizes, **options})
        return [kind.window for kind in config.layer_kinds]

    full, sliding = "full_attention", "sliding_attention"
    types = [full, sliding, sliding, full, sliding]
    by_types = [None, 64, 64, None, 64]
    assert windows("qwen2", use_sliding_window=True, max_window_layers=3) == [None] * 3 + [64] * 2
    for family in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        used = {"use_sliding_window": True, "max_window_layers": 1} if family.startswith("qwen") else {}
        assert windows(family, layer_types=types, **used) == by_types
    assert windows("gemma2") == [64, None, 64, None, 64]
    assert windows("gemma3_text") == [64] * 5
    assert windows("gemma3_text", num_hidden_layers=8) == [64] * 5 + [None] + [64] * 2
    assert windows("gemma3_text", sliding_window_pattern=3) == [64, 64, None, 64, 64]
    assert windows("gemma3_text", sliding_window_pattern=10**9) == [64] * 5
    assert windows("gemma2", sliding_window=8192) == [None] * 5, "no token is that far away"
    assert windows("gemma2", layer_types=[full] * 5, sliding_window=None) == [None] * 5


def test_a_stage_has_the_kinds_of_its_own_layers() -> None:
    config = config_from_hf({**GEMMA3, "num_hidden_layers": 15})
    for span in (LayerSpan(0, 4, 15), LayerSpan(4, 13, 15), LayerSpan(13, 15, 15)):
        assert of_span(config, span).layer_kinds == config.layer_kinds[span.start : span.stop]


def test_layers_with_a_window_have_other_rotary_positions() -> None:
    """Gemma 3, in the spellings of transformers 4 and 5; a factor stretches the layers without a window alone."""
    old = {"rope_theta": 5e5, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    parts = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    local, whole = RopeConfig(theta=100.0), RopeConfig(theta=5e5, kind="linear", factor=8.0)
    for options in (old, {"rope_parameters": parts}):
        kinds = config_from_hf({**GEMMA3, "max_position_embeddings": 512, **options}).layer_kinds
        assert [kind.rope for kind in kinds[:7]] == [local] * 5 + [whole, local]
        assert {kind.window for kind in kinds} == {None}, "they differ even if the window has no effect"
    plain = config_from_hf(GEMMA3)
    assert (plain.rope, plain.windowed_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))


def test_scales_and_caps_of_gemma() -> None:
    config = config_from_hf({**GEMMA2, "query_pre_attn_scalar": 144, "hidden_act": "is not read"})
    assert (config.score_scale, config.embedding_scale, config.norm_offset) == (1 / 12, 2304**0.5, 1.0)
    assert (config.attention_soft_cap, config.logit_soft_cap, config.activation) == (50.0, 30.0, "gelu_tanh")
    none = config_from_hf({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (none.attention_soft_cap, none.logit_soft_cap) == (None, None)
    assert config_from_hf(GEMMA3).logit_soft_cap is None
    assert config_from_hf(QWEN2).score_scale == 128**-0.5


def test_of_a_model_for_images_the_texts_are_read() -> None:
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    outer = {"vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256, "eos_token_id": [1, 106]}
    nested = config_from_hf({"model_type": "gemma3", "text_config": {**GEMMA3, **text, "eos_token_id": 1}, **outer})
    assert nested == replace(config_from_hf({**GEMMA3, **text, "eos_token_id": [1, 106]}), family="gemma3")
    with pytest.raises(ConfigError, match=r"text_config: .*must be"):
        config_from_hf({"model_type": "gemma3", "text_config": {"sliding_window": 0}})


def test_rotated_shares() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8}
    scaled = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 500.0}}
    for options, dim, theta in (
        ({}, 16, 1e4),
        ({"rotary_pct": 0.5, "rotary_emb_base": 100}, 32, 100.0),
        (scaled, None, 500.0),
    ):
        rope = config_from_hf({**neox, "rotary_pct": 0.25, **options}).rope
        assert rope is not None and (rope.rotated_dim, rope.theta) == (dim, theta)
    long = {"type": "su", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    sizes = {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 8192,
    }
    phi = config_from_hf({"model_type": "phi3", **sizes, "rope_scaling": long})
    assert phi.rope is not None and (phi.rope.kind, phi.rope.rotated_dim, phi.max_positions) == ("longrope", 48, 4096)


def test_old_and_new_spellings_of_rope_agree() -> None:
    kind = {"factor": 4.0}
    old = config_from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", **kind}})
    new = config_from_hf({**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, **kind}})
    assert old == new
    assert new.rope is not None
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("linear", 5e5, 4.0)


def test_of_two_spellings_rope_scaling_counts(caplog: pytest.LogCaptureFixture) -> None:
    """All of `rope_parameters` is dropped, as in transformers, its `rope_theta` too."""
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    both = config_from_hf({**LLAMA, "rope_parameters": new, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert both.rope == RopeConfig(theta=10000.0, kind="dynamic", factor=2.0)
    assert "rope_scaling replaces rope_parameters" in caplog.text
    for nothing in (None, {}):
        assert config_from_hf({**LLAMA, "rope_parameters": new, "rope_scaling": nothing}).rope == RopeConfig(
            theta=5e5, kind="linear", factor=4.0
        )


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_outer_original_length_counts(kind: str) -> None:
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": kind, "original_max_position_embeddings": 64, **numbers, **factors}
    for outer, expected in ((None, 64), (16, 16)):
        config = config_from_hf({**LLAMA, "rope_parameters": rope, "original_max_position_embeddings": outer})
        assert config.rope is not None and config.rope.original_max_position == expected
        assert config.max_positions == (expected if kind == "longrope" else 2048)


def test_changing_frequencies_limit_the_context() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors}
    assert config_from_hf({**LLAMA, "max_position_embeddings": 131072, "rope_parameters": rope}).max_positions == 4096


def test_without_a_key_there_is_no_end_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers: the default of the family joins neither the tokens of the other file nor an empty list."""
    for family in (GPT2, LLAMA):
        (tmp_path / "config.json").write_text(json.dumps({**family, "vocab_size": 97}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
        assert read_model_config(tmp_path).eos_token_ids == (7,)
        assert not caplog.records
        (tmp_path / "generation_config.json").write_text("{}")
        assert read_model_config(tmp_path).eos_token_ids == ()
        assert "no eos_token_id" in caplog.text
        caplog.clear()


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "eos_token_id": 7}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (7, 9)


def test_the_page_of_models_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.model.page"


@pytest.mark.parametrize("name", HUB)
def test_configurations_of_the_hub_are_read(name: str) -> None:
    config = config_from_hf(HUB[name])
    assert config.vocab_size == HUB[name]["vocab_size"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_table_of_a_family_has_the_keys_that_it_reads(family: Family) -> None:
    read: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

    family.config_from_hf(Recorder(model_type=family.name))
    assert read - SHARED == family.keys
    harmless = [key for keys in HARMLESS.values() for key in keys]
    assert len(harmless) == len(set(harmless))
    assert not set(harmless) & (SHARED | FIXED.keys() | family.keys | family.fixed.keys() | family.aliases.keys())


def test_unknown_keys_are_named_together_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"'num_layer', 'b'; .*did you mean 'n_layer'.*remove it"):
        config_from_hf({**GPT2, "num_layer": 2, "b": 1, "null counts as missing": None})
    with pytest.raises(ConfigError, match=r"and 995 more") as caught:
        config_from_hf({**LLAMA, **{"x" * 10**4 + str(i): i for i in range(1000)}})
    assert len(caught.value.message) < 1000


def test_gpt2_has_two_names_for_its_sizes() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 64}
    config = config_from_hf({**GPT2, **sizes, "n_layer": 3})
    assert (config.embed_dim, config.num_heads, config.num_layers, config.max_positions) == (48, 4, 3, 64)


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
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "scale_attn_weights",
    "is_causal",
    "norm_topk_prob",
    "qkv_bias",
    "truncate",
    "use_sliding_window",
    "use_parallel_residual",
}
COUNTS = {"max_window_layers"}  # 0 has a meaning


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_malformed_values_are_refused_by_name(family: Family) -> None:
    """Values of another type are never converted, and never lead to an error of Python."""
    optional = {"rope_parameters", "rope_scaling", "text_config"}
    known = family.keys | family.fixed.keys() | FIXED.keys() | {"tie_word_embeddings"}
    for key in sorted(known - family.harmless):
        bad = [0, 1, 2.0] if key in BOOLEANS else [True, False, *([] if key in COUNTS else [0])]
        for value in [*MALFORMED, *bad]:
            without_effect = () if key in family.keys else FIXED.get(key, family.fixed.get(key, ()))
            if value in without_effect or (key in optional and value == {}):
                continue
            with pytest.raises(ConfigError, match=f"config.json.*{key}|{key}.*config.json") as caught:
                config_from_hf({"model_type": family.name, key: value})
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
                config_from_hf({**LLAMA, "rope_parameters": {"rope_type": kind, **good, key: value}})


@pytest.mark.parametrize(
    ("rope", "param"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"gpt2"'])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt5'.*gpt2-xl"):
        read_model_config("preset:gpt5")
