"""The texts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with other defaults.

Positions are in three parts, for time, height and width. Those of texts are the same in all three, so that sections
have no effect.
"""

from dataclasses import replace

from orca_jax.config import ModelConfig
from orca_jax.model.families import llama
from orca_jax.model.families.base import Family
from orca_jax.model.families.qwen import QWEN2, QWEN3
from orca_jax.model.families.rope import SECTIONS, RopeRules
from orca_jax.model.families.values import HfConfig
from orca_jax.model.families.windows import windows_of_qwen


def qwen2_from_hf(hf: HfConfig) -> ModelConfig:
    """Read the texts of Qwen2-VL and Qwen2.5-VL; raises `ConfigError` as `llama.config_from_hf` does."""
    rules = RopeRules(theta=1e6, renamed={"mrope": "default"}, notes=SECTIONS)
    config = llama.read_shape(hf, "qwen2_vl_text", norm_eps=1e-5, rules=rules)
    windows = windows_of_qwen(hf, config.num_layers, config.max_positions, 80)
    return replace(config, attention_bias=True, **windows._asdict())


def qwen3_from_hf(hf: HfConfig) -> ModelConfig:
    """Read the texts of Qwen3-VL; raises `ConfigError` as `llama.config_from_hf` does."""
    rules = RopeRules(theta=5e5, renamed={"mrope": "default"}, notes=SECTIONS)
    config = llama.read_shape(hf, "qwen3_vl_text", rules=rules)
    return replace(config, qk_norm="head", **llama.attention_biases(hf))


QWEN2_VL_TEXT: Family = replace(QWEN2, name="qwen2_vl_text", config_from_hf=qwen2_from_hf)
QWEN3_VL_TEXT: Family = replace(
    QWEN3, name="qwen3_vl_text", config_from_hf=qwen3_from_hf, keys=llama.KEYS | {"attention_bias"}
)
