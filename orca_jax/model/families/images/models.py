"""The models for images and texts whose texts are those of a served family."""

from orca_jax.model.families.deepseek import DEEPSEEK_V3
from orca_jax.model.families.dense.gemma4 import GEMMA4_TEXT
from orca_jax.model.families.images.qwen_vl import QWEN2_VL_TEXT, QWEN3_VL_TEXT
from orca_jax.model.families.images.wrapped import wrapper
from orca_jax.model.families.llama import LLAMA
from orca_jax.model.families.mistral import MINISTRAL3, MISTRAL
from orca_jax.model.families.qwen import QWEN2, QWEN3
from orca_jax.model.families.qwen_moe import QWEN3_MOE
from orca_jax.model.families.states.lfm import LFM2
from orca_jax.model.families.states.qwen_next import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT

_TEXTS = {family.name: family for family in (LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN3_MOE)}


_KIMI = {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": DEEPSEEK_V3}  # the second name is that of published files
_PROJECTION = frozenset({"projection_hidden_size", "projection_layer_norm_eps"})
_LFM = frozenset({"projector_bias", "projector_hidden_size", "projector_use_layernorm", "tie_embedding"})


def _names(prefix: str) -> tuple[str, str]:
    return f"{prefix}ForConditionalGeneration", f"{prefix}Model"


WRAPPERS = (
    wrapper("qwen2_vl", "Qwen2-VL", _names("Qwen2VL"), {"qwen2_vl_text": QWEN2_VL_TEXT}, "qwen2_vl_text", is_flat=True),
    wrapper(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        _names("Qwen2_5_VL"),
        {"qwen2_5_vl_text": QWEN2_VL_TEXT},
        "qwen2_5_vl_text",
        is_flat=True,
    ),
    wrapper("qwen3_vl", "Qwen3-VL", _names("Qwen3VL"), {"qwen3_vl_text": QWEN3_VL_TEXT}, "qwen3_vl_text", tied=False),
    wrapper("gemma4", "Gemma 4", _names("Gemma4"), {"gemma4_text": GEMMA4_TEXT}, "gemma4_text", tied=True),
    wrapper("qwen3_5", "Qwen3.5", _names("Qwen3_5"), {"qwen3_5_text": QWEN3_5_TEXT}, "qwen3_5_text", tied=False),
    wrapper(
        "qwen3_5_moe",
        "Qwen3.5 with experts",
        _names("Qwen3_5Moe"),
        {"qwen3_5_moe_text": QWEN3_5_MOE_TEXT},
        "qwen3_5_moe_text",
        tied=False,
    ),
    wrapper("internvl", "InternVL 3 and 3.5", _names("InternVL"), _TEXTS, "qwen2", tied=True),
    wrapper("mistral3", "Mistral Small 3.1 and 3.2, Ministral 3", _names("Mistral3"), _TEXTS, "mistral", tied=True),
    wrapper("llava", "LLaVA 1.5, Pixtral", _names("Llava"), _TEXTS, "llama"),
    wrapper("llava_next", "LLaVA 1.6", _names("LlavaNext"), _TEXTS, "llama"),
    wrapper("llava_next_video", "LLaVA-NeXT-Video", _names("LlavaNextVideo"), _TEXTS, "llama"),
    wrapper("video_llava", "Video-LLaVA", _names("VideoLlava"), _TEXTS, "llama"),
    wrapper("vipllava", "ViP-LLaVA", _names("VipLlava"), _TEXTS, "llama"),
    wrapper("llava_onevision", "LLaVA-OneVision", _names("LlavaOnevision"), _TEXTS, "qwen2"),
    wrapper("idefics3", "Idefics 3", _names("Idefics3"), _TEXTS, "llama", tied=False),
    wrapper("smolvlm", "SmolVLM", _names("SmolVLM"), _TEXTS, "llama", tied=False),
    wrapper("got_ocr2", "GOT-OCR 2", _names("GotOcr2"), _TEXTS, "qwen2", tied=True),
    wrapper("lfm2_vl", "LFM2-VL", _names("Lfm2Vl"), {"lfm2": LFM2}, "lfm2", tied=True, harmless=_LFM),
    wrapper("kimi_k25", "Kimi K2.5", _names("Kimi_K25"), _KIMI, "deepseek_v3", tied=True, harmless=_PROJECTION),
    wrapper("lighton_ocr", "LightOnOCR", _names("LightOnOcr"), _TEXTS, "qwen3", tied=True),
)
