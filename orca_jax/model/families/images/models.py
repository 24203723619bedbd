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
    wrapper("qwen2_vl", _of("qwen2_vl_text"), is_flat=True),
    wrapper("qwen2_5_vl", {"qwen2_5_vl_text": _TEXTS["qwen2_vl_text"]}, is_flat=True),
    wrapper("qwen3_vl", _of("qwen3_vl_text"), tied=False),
    wrapper("llama4", _of("llama4_text")),
    wrapper("gemma4", _of("gemma4_text"), tied=True),
    wrapper("gemma4_unified", _of("gemma4_unified_text"), tied=True),
    wrapper("qwen3_5", _of("qwen3_5_text"), tied=False),
    wrapper("qwen3_5_moe", _of("qwen3_5_moe_text"), tied=False),
    wrapper("internvl", _ANY, default="qwen2", tied=True),
    wrapper("mistral3", _ANY | _of("mistral4"), default="mistral", tied=True),
    wrapper("llava", _ANY),
    wrapper("llava_next", _ANY),
    wrapper("llava_next_video", _ANY),
    wrapper("video_llava", _ANY),
    wrapper("vipllava", _ANY),
    wrapper("llava_onevision", _ANY, default="qwen2"),
    wrapper("idefics3", _ANY, tied=False),
    wrapper("smolvlm", _ANY, tied=False),
    wrapper("got_ocr2", _ANY, default="qwen2", tied=True),
    wrapper(
        "lfm2_vl",
        _of("lfm2"),
        "projector_bias projector_hidden_size projector_use_layernorm tie_embedding",
        tied=True,
    ),
    wrapper(
        "kimi_k25",
        _of("deepseek_v3 kimi_k2"),  # the second name is that of published files
        "projection_hidden_size projection_layer_norm_eps",
        tied=True,
        layers="blocks",  # as transformers 5.23 writes them
    ),
    wrapper("cohere2_vision", _COHERE, tied=True),
    wrapper("aya_vision", _COHERE, tied=True),
    wrapper("exaone4_5", _EXAONE, tied=False),
    wrapper("glm4v", _of(_GLM)),
    wrapper("glm4v_moe", _of(_GLM), default="glm4v_moe_text"),
    wrapper("glm46v", _of(_GLM), tied=False),
    wrapper(
        "aria",
        _of("aria_text"),
        "max_value_projector_patch_to_query_dict projector_patch_to_query_dict",
        tied=False,
    ),
    wrapper("deepseek_vl", _ANY, tied=True),
    wrapper(
        "ovis2",
        _ANY,
        "hidden_size vocab_size",  # of the texts, beside `text_config`
        default="qwen2",
        tied=True,
    ),
    wrapper("video_llama_3", _ANY, default="qwen2"),
    wrapper("lighton_ocr", _ANY, default="qwen3", tied=True),
)
