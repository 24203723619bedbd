"""The texts of GLM-4.1V and GLM-4.5V: GLM-4 and GLM-4.5 with positions in three parts, which are the same for texts."""

from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.dense.pairs import GLM4
from orca_jax.model.families.mixtures.sigmoid import GLM4_MOE, GROUPED_KEYS, grouped_experts
from orca_jax.model.families.rope import SECTIONS, RopeRules
from orca_jax.model.families.values import get_bool, get_count

_RENAMED = {"mrope": "default"}
GLM4V_TEXT = near_llama(
    "glm4v_text",
    "GLM-4.1V",
    "Glm4vText",
    LlamaShape(1e-5, rules=RopeRules(share=1.0, renamed=_RENAMED, notes=SECTIONS)),
    lambda hf, config: {"attention_bias": True, "residual": "both_norms"},
    weights=GLM4.weights,
)
GLM4V_MOE_TEXT = near_llama(
    "glm4v_moe_text",
    "GLM-4.5V",
    "Glm4vMoeText",
    LlamaShape(1e-5, rules=RopeRules(share=0.5, renamed=_RENAMED, notes=SECTIONS)),
    lambda hf, config: {
        **grouped_experts(
            hf, config, (128, 8, 1408), num_dense=get_count(hf, "first_k_dense_replace", 1)
        ),
        "attention_bias": get_bool(hf, "attention_bias", True),
    },
    GROUPED_KEYS | {"attention_bias", "first_k_dense_replace"},
    GLM4_MOE.weights,
    aliases=GLM4_MOE.aliases,
    harmless=GLM4_MOE.harmless | {"use_qk_norm"},
)
