"""The models for images and texts whose texts are those of a served family."""

from dataclasses import replace

from orca_jax.model.families.dense.gemma4 import GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT
from orca_jax.model.families.dense.pairs import COHERE2
from orca_jax.model.families.dense.partly_rotated import EXAONE4
from orca_jax.model.families.images.glm import GLM4V_MOE_TEXT, GLM4V_TEXT
from orca_jax.model.families.images.qwen_vl import QWEN2_VL_TEXT, QWEN3_VL_TEXT
from orca_jax.model.families.images.wrapped import wrapper
from orca_jax.model.families.llama import LLAMA
from orca_jax.model.families.mistral import MINISTRAL3, MISTRAL
from orca_jax.model.families.mixtures.deepseek import DEEPSEEK_V3
from orca_jax.model.families.mixtures.llama4 import LLAMA4_TEXT
from orca_jax.model.families.mixtures.mistral4 import MISTRAL4
from orca_jax.model.families.mixtures.near_qwen import ARIA_TEXT
from orca_jax.model.families.mixtures.qwen_moe import QWEN3_MOE
from orca_jax.model.families.qwen import QWEN2, QWEN3
from orca_jax.model.families.states.lfm import LFM2
from orca_jax.model.families.states.qwen_next import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT

_TEXTS = {family.name: family for family in (LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN3_MOE)}


# the second name is that of published files
_KIMI = {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": DEEPSEEK_V3}
_GLM = {"glm4v_text": GLM4V_TEXT, "glm4v_moe_text": GLM4V_MOE_TEXT}
# Transformers' models for images and texts leave out the factor on logits.
_COHERE = {
    "cohere2": replace(
        COHERE2, config_from_hf=lambda hf: replace(COHERE2.config_from_hf(hf), logit_scale=1.0)
    )
}
_LLAMA4 = {"llama4_text": LLAMA4_TEXT}
# the second name is that of older files
_EXAONE = dict.fromkeys(("exaone4", "exaone4_5_text"), EXAONE4)
_PROJECTION = frozenset({"projection_hidden_size", "projection_layer_norm_eps"})
_ARIA = frozenset({"max_value_projector_patch_to_query_dict", "projector_patch_to_query_dict"})
_OVIS = frozenset({"hidden_size", "vocab_size"})  # of the texts, beside `text_config`
_LFM = frozenset(
    {"projector_bias", "projector_hidden_size", "projector_use_layernorm", "tie_embedding"}
)


def _names(prefix: str) -> tuple[str, str]:
    return f"{prefix}ForConditionalGeneration", f"{prefix}Model"


WRAPPERS = (
    wrapper(
        "qwen2_vl",
        "Qwen2-VL",
        _names("Qwen2VL"),
        {"qwen2_vl_text": QWEN2_VL_TEXT},
        "qwen2_vl_text",
        is_flat=True,
    ),
    wrapper(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        _names("Qwen2_5_VL"),
        {"qwen2_5_vl_text": QWEN2_VL_TEXT},
        "qwen2_5_vl_text",
        is_flat=True,
    ),
    wrapper(
        "qwen3_vl",
        "Qwen3-VL",
        _names("Qwen3VL"),
        {"qwen3_vl_text": QWEN3_VL_TEXT},
        "qwen3_vl_text",
        tied=False,
    ),
    wrapper("llama4", "Llama 4", ("Llama4ForConditionalGeneration",), _LLAMA4, "llama4_text"),
    wrapper(
        "gemma4",
        "Gemma 4",
        _names("Gemma4"),
        {"gemma4_text": GEMMA4_TEXT},
        "gemma4_text",
        tied=True,
    ),
    wrapper(
        "gemma4_unified",
        "Gemma 4 12B",
        _names("Gemma4Unified"),
        {"gemma4_unified_text": GEMMA4_UNIFIED_TEXT},
        "gemma4_unified_text",
        tied=True,
    ),
    wrapper(
        "qwen3_5",
        "Qwen3.5 and Qwen3.6",
        _names("Qwen3_5"),
        {"qwen3_5_text": QWEN3_5_TEXT},
        "qwen3_5_text",
        tied=False,
    ),
    wrapper(
        "qwen3_5_moe",
        "Qwen3.5 and Qwen3.6 with experts",
        _names("Qwen3_5Moe"),
        {"qwen3_5_moe_text": QWEN3_5_MOE_TEXT},
        "qwen3_5_moe_text",
        tied=False,
    ),
    wrapper("internvl", "InternVL 3 and 3.5", _names("InternVL"), _TEXTS, "qwen2", tied=True),
    wrapper(
        "mistral3",
        "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        _names("Mistral3"),
        {**_TEXTS, "mistral4": MISTRAL4},
        "mistral",
        tied=True,
    ),
    wrapper("llava", "LLaVA 1.5, Pixtral", _names("Llava"), _TEXTS, "llama"),
    wrapper("llava_next", "LLaVA 1.6", _names("LlavaNext"), _TEXTS, "llama"),
    wrapper("llava_next_video", "LLaVA-NeXT-Video", _names("LlavaNextVideo"), _TEXTS, "llama"),
    wrapper("video_llava", "Video-LLaVA", _names("VideoLlava"), _TEXTS, "llama"),
    wrapper("vipllava", "ViP-LLaVA", _names("VipLlava"), _TEXTS, "llama"),
    wrapper("llava_onevision", "LLaVA-OneVision", _names("LlavaOnevision"), _TEXTS, "qwen2"),
    wrapper("idefics3", "Idefics 3", _names("Idefics3"), _TEXTS, "llama", tied=False),
    wrapper("smolvlm", "SmolVLM", _names("SmolVLM"), _TEXTS, "llama", tied=False),
    wrapper("got_ocr2", "GOT-OCR 2", _names("GotOcr2"), _TEXTS, "qwen2", tied=True),
    wrapper(
        "lfm2_vl", "LFM2-VL", _names("Lfm2Vl"), {"lfm2": LFM2}, "lfm2", tied=True, harmless=_LFM
    ),
    wrapper(
        "kimi_k25",
        "Kimi K2.5",
        _names("Kimi_K25"),
        _KIMI,
        "deepseek_v3",
        tied=True,
        layers="blocks",  # as transformers 5.23 writes them
        harmless=_PROJECTION,
    ),
    wrapper(
        "cohere2_vision", "Command A Vision", _names("Cohere2Vision"), _COHERE, "cohere2", tied=True
    ),
    wrapper("aya_vision", "Aya Vision", _names("AyaVision"), _COHERE, "cohere2", tied=True),
    wrapper("exaone4_5", "EXAONE 4.5", _names("Exaone4_5_"), _EXAONE, "exaone4", tied=False),
    wrapper("glm4v", "GLM-4.1V", _names("Glm4v"), _GLM, "glm4v_text"),
    wrapper("glm4v_moe", "GLM-4.5V", _names("Glm4vMoe"), _GLM, "glm4v_moe_text"),
    wrapper("glm46v", "GLM-4.6V", _names("Glm46V"), _GLM, "glm4v_text", tied=False),
    wrapper(
        "aria",
        "Aria",
        _names("Aria"),
        {"aria_text": ARIA_TEXT},
        "aria_text",
        tied=False,
        harmless=_ARIA,
    ),
    wrapper("deepseek_vl", "DeepSeek-VL", _names("DeepseekVL"), _TEXTS, "llama", tied=True),
    wrapper("ovis2", "Ovis2", _names("Ovis2"), _TEXTS, "qwen2", tied=True, harmless=_OVIS),
    wrapper("video_llama_3", "VideoLLaMA 3", _names("VideoLlama3"), _TEXTS, "qwen2"),
    wrapper("lighton_ocr", "LightOnOCR", _names("LightOnOcr"), _TEXTS, "qwen3", tied=True),
)
