"""Families that are a Llama with other defaults, biases or windows: CWM, InternLM 3, IQuest-Coder, Seed-OSS."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama, rope
from orca_jax.model.families.base import Family
from orca_jax.model.families.values import HfConfig, get_bool
from orca_jax.model.families.windows import windows_of_pattern

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def cwm_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of CWM; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "head_dim": 128,
    }
    rules = rope.RopeRules(theta=1e6, default=_CWM_ROPE)
    config = llama.read_shape(hf, "cwm", defaults, norm_eps=1e-5, rules=rules)
    windows = windows_of_pattern(hf, config.num_layers, config.max_positions, (False, True, True, True), 8192)
    return replace(config, mlp_bias=get_bool(hf, "mlp_bias", False), **windows._asdict())


def internlm3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of InternLM 3; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    }
    return _with_biases(hf, "internlm3", defaults)


def iquestcoder_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of IQuest-Coder; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 76800,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "head_dim": 128,
    }
    return _with_biases(hf, "iquestcoder", defaults)


def _with_biases(hf: HfConfig, family: str, defaults: Mapping[str, int]) -> ModelConfig:
    """Read a shape, and whether attention and MLPs have biases."""
    config = llama.read_shape(hf, family, defaults, norm_eps=1e-5)
    return replace(config, **llama.attention_biases(hf), mlp_bias=get_bool(hf, "mlp_bias", False))


def seed_oss_from_hf(hf: HfConfig) -> ModelConfig:
    """Read a config.json of Seed-OSS; raises `ConfigError` as `llama.config_from_hf` does."""
    defaults = {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
        "head_dim": 128,
    }
    config = llama.read_shape(hf, "seed_oss", defaults)
    return replace(
        config,
        attention_bias=get_bool(hf, "attention_bias", True),
        attention_out_bias=get_bool(hf, "attention_out_bias", False),
        mlp_bias=get_bool(hf, "mlp_bias", False),
    )


def _family(
    name: str, models: str, prefix: str, config_from_hf: Callable[[HfConfig], ModelConfig], keys: frozenset[str]
) -> Family:
    return Family(
        name=name,
        models=models,
        config_from_hf=config_from_hf,
        keys=llama.KEYS | keys,
        architectures=(f"{prefix}ForCausalLM", f"{prefix}Model"),
        weights=llama.weights,
        prefixes=llama.PREFIXES,
        ignored=llama.IGNORED,
    )


_BIASES = frozenset({"attention_bias", "mlp_bias"})
CWM = _family("cwm", "CWM", "Cwm", cwm_from_hf, frozenset({"mlp_bias", "layer_types", "sliding_window"}))
INTERNLM3 = replace(
    _family("internlm3", "InternLM 3", "InternLM3", internlm3_from_hf, _BIASES),
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUESTCODER = replace(
    _family("iquestcoder", "IQuest-Coder", "IQuestCoder", iquestcoder_from_hf, _BIASES),
    fixed={"clip_qkv": (None,)},
    harmless=frozenset({"max_window_layers"}),  # of windows, which are refused
)
SEED_OSS = replace(
    _family("seed_oss", "Seed-OSS", "SeedOss", seed_oss_from_hf, _BIASES | {"attention_out_bias"}),
    harmless=frozenset({"residual_dropout"}),
)
