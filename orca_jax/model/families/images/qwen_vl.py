"""The texts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with other defaults.

Positions are in three parts, for time, height and width. Those of texts are the same in all three, so that sections
have no effect.
"""

from orca_jax.model.families import llama
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.qwen import QWEN2
from orca_jax.model.families.rope import SECTIONS, RopeRules
from orca_jax.model.families.windows import QWEN_KEYS, windows_of_qwen

_RULES = RopeRules(theta=1e6, renamed={"mrope": "default"}, notes=SECTIONS)
QWEN2_VL_TEXT = near_llama(
    "qwen2_vl_text",
    "Qwen2-VL and Qwen2.5-VL",
    "Qwen2VLText",
    LlamaShape(1e-5, rules=_RULES),
    lambda hf, config: {
        "attention_bias": True,
        **windows_of_qwen(hf, config.num_layers, config.max_positions, 80)._asdict(),
    },
    QWEN_KEYS,
    fixed=QWEN2.fixed,
)
QWEN3_VL_TEXT = near_llama(
    "qwen3_vl_text",
    "Qwen3-VL",
    "Qwen3VLText",
    LlamaShape(rules=_RULES._replace(theta=5e5)),
    lambda hf, config: {**llama.attention_biases(hf), "qk_norm": "head"},
    frozenset({"attention_bias"}),
)
