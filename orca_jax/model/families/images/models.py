"""The models for images and texts whose texts are those of a served family."""

from dataclasses import replace

from orca_jax.model.families.family import Family
from orca_jax.model.families.images.texts import IMAGE_TEXTS
from orca_jax.model.families.images.wrapped import wrapper
from orca_jax.model.families.texts import TEXTS

_TEXTS = {**TEXTS, **{family.name: family for family in IMAGE_TEXTS}}


def _of(kinds: str) -> dict[str, Family]:
    """The families of texts with these names; the first is the usual one."""
    return {kind: _TEXTS[kind] for kind in kinds.split()}


_ANY = _of("llama mistral ministral3 qwen2 qwen3 qwen3_moe")
_COHERE = {
    # transformers' models for images and texts leave out the factor on logits
    "cohere2": replace(TEXTS["cohere2"], fields=(*TEXTS["cohere2"].fields, {"logit_scale": 1.0}))
}
# the second name is that of older files
_EXAONE = dict.fromkeys(("exaone4", "exaone4_5_text"), TEXTS["exaone4"])
_GLM = "glm4v_text glm4v_moe_text"

WRAPPERS = (
    wrapper("qwen2_vl", "Qwen2-VL", "Qwen2VL", _of("qwen2_vl_text"), is_flat=True),
    wrapper(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        "Qwen2_5_VL",
        {"qwen2_5_vl_text": _TEXTS["qwen2_vl_text"]},
        is_flat=True,
    ),
    wrapper("qwen3_vl", "Qwen3-VL", "Qwen3VL", _of("qwen3_vl_text"), tied=False),
    wrapper("llama4", "Llama 4", ("Llama4ForConditionalGeneration",), _of("llama4_text")),
    wrapper("gemma4", "Gemma 4", "Gemma4", _of("gemma4_text"), tied=True),
    wrapper(
        "gemma4_unified", "Gemma 4 12B", "Gemma4Unified", _of("gemma4_unified_text"), tied=True
    ),
    wrapper("qwen3_5", "Qwen3.5 and Qwen3.6", "Qwen3_5", _of("qwen3_5_text"), tied=False),
    wrapper(
        "qwen3_5_moe",
        "Qwen3.5 and Qwen3.6 with experts",
        "Qwen3_5Moe",
        _of("qwen3_5_moe_text"),
        tied=False,
    ),
    wrapper("internvl", "InternVL 3 and 3.5", "InternVL", _ANY, default="qwen2", tied=True),
    wrapper(
        "mistral3",
        "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        "Mistral3",
        _ANY | _of("mistral4"),
        default="mistral",
        tied=True,
    ),
    wrapper("llava", "LLaVA 1.5, Pixtral", "Llava", _ANY),
    wrapper("llava_next", "LLaVA 1.6", "LlavaNext", _ANY),
    wrapper("llava_next_video", "LLaVA-NeXT-Video", "LlavaNextVideo", _ANY),
    wrapper("video_llava", "Video-LLaVA", "VideoLlava", _ANY),
    wrapper("vipllava", "ViP-LLaVA", "VipLlava", _ANY),
    wrapper("llava_onevision", "LLaVA-OneVision", "LlavaOnevision", _ANY, default="qwen2"),
    wrapper("idefics3", "Idefics 3", "Idefics3", _ANY, tied=False),
    wrapper("smolvlm", "SmolVLM", "SmolVLM", _ANY, tied=False),
    wrapper("got_ocr2", "GOT-OCR 2", "GotOcr2", _ANY, default="qwen2", tied=True),
    wrapper(
        "lfm2_vl",
        "LFM2-VL",
        "Lfm2Vl",
        _of("lfm2"),
        "projector_bias projector_hidden_size projector_use_layernorm tie_embedding",
        tied=True,
    ),
    wrapper(
        "kimi_k25",
        "Kimi K2.5",
        "Kimi_K25",
        _of("deepseek_v3 kimi_k2"),  # the second name is that of published files
        "projection_hidden_size projection_layer_norm_eps",
        tied=True,
        layers="blocks",  # as transformers 5.23 writes them
    ),
    wrapper("cohere2_vision", "Command A Vision", "Cohere2Vision", _COHERE, tied=True),
    wrapper("aya_vision", "Aya Vision", "AyaVision", _COHERE, tied=True),
    wrapper("exaone4_5", "EXAONE 4.5", "Exaone4_5_", _EXAONE, tied=False),
    wrapper("glm4v", "GLM-4.1V", "Glm4v", _of(_GLM)),
    wrapper("glm4v_moe", "GLM-4.5V", "Glm4vMoe", _of(_GLM), default="glm4v_moe_text"),
    wrapper("glm46v", "GLM-4.6V", "Glm46V", _of(_GLM), tied=False),
    wrapper(
        "aria",
        "Aria",
        "Aria",
        _of("aria_text"),
        "max_value_projector_patch_to_query_dict projector_patch_to_query_dict",
        tied=False,
    ),
    wrapper("deepseek_vl", "DeepSeek-VL", "DeepseekVL", _ANY, tied=True),
    wrapper(
        "ovis2",
        "Ovis2",
        "Ovis2",
        _ANY,
        "hidden_size vocab_size",  # of the texts, beside `text_config`
        default="qwen2",
        tied=True,
    ),
    wrapper("video_llama_3", "VideoLLaMA 3", "VideoLlama3", _ANY, default="qwen2"),
    wrapper("lighton_ocr", "LightOnOCR", "LightOnOcr", _ANY, default="qwen3", tied=True),
)
