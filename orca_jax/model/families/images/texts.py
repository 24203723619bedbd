"""The texts of models for images: GLM-4, GLM-4.5, Qwen2 and Qwen3 with other defaults.

Positions are in three parts, for time, height and width. Those of texts are the same in all three, so that sections
have no effect.
"""

from orca_jax.model.families.dense.pairs import GLM4_NAMES
from orca_jax.model.families.experts import (
    GROUPED_ALIASES,
    NEXT_TOKENS,
    OF_ROUTERS,
    first_layers,
    grouped_experts,
)
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, flag, off
from orca_jax.model.families.names import SIGMOID
from orca_jax.model.families.rope import SECTIONS, RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.windows import windows_of_qwen

_ROPE = RopeRules(renamed={"mrope": "default"}, notes=SECTIONS)
IMAGE_TEXTS = (
    Family(
        "glm4v_text",
        ({"attention_bias": True, "residual": "both_norms"},),
        GLM4_NAMES,
        shape=LlamaShape(rules=_ROPE._replace(share=1.0)),
    ),
    Family(
        "glm4v_moe_text",
        (
            grouped_experts((128, 8, 1408), first_layers(1)),
            {"attention_bias": flag("attention_bias", True)},
        ),
        SIGMOID,
        shape=LlamaShape(rules=_ROPE._replace(share=0.5)),
        aliases=GROUPED_ALIASES,
        unread=OF_ROUTERS + NEXT_TOKENS + "use_qk_norm",
        needed={"head_dim": 128},
    ),
    Family(
        "qwen2_vl_text",
        ({"attention_bias": True}, windows_of_qwen(80)),
        shape=LlamaShape(rules=_ROPE),
        fixed=off("use_mrope"),
    ),
    Family("qwen3_vl_text", (ATTENTION_BIASES, {"qk_norm": "head"}), shape=LlamaShape(rules=_ROPE)),
)
