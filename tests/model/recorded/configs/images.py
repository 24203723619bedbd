"""Configurations of models for images and texts. The part for images is as small as its class allows."""

from collections.abc import Callable
from random import Random

from tests.model.recorded.configs.dense import cohere2, exaone4
from tests.model.recorded.configs.mixtures import aria_text, glm4_moe
from tests.model.recorded.configs.sizes import Config, llama, rope, theta, without

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 8,
    "vocab_size": 4,
}
_SIGLIP = without(_CLIP, "projection_dim", "vocab_size") | {"model_type": "siglip_vision_model"}
_QWEN_VISION = {
    "depth": 1,
    "embed_dim": 8,
    "hidden_size": 8,
    "num_heads": 1,
    "mlp_ratio": 1,
    "patch_size": 4,
    "intermediate_size": 8,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_PIXTRAL = without(_CLIP, "projection_dim", "vocab_size") | {"model_type": "pixtral", "head_dim": 8}
_GLM_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 1,
    "image_size": 8,
    "patch_size": 4,
    "intermediate_size": 8,
}
_VISIONS = {
    "cohere2_vision": _SIGLIP,
    "aya_vision": _SIGLIP,
    "deepseek_vl": _SIGLIP,
    "exaone4_5": _QWEN_VISION | {"num_key_value_heads": 1},
    "ovis2": without(_CLIP, "model_type", "projection_dim") | {"vocab_size": 8},
    "video_llama_3": without(_SIGLIP, "model_type", "image_size"),
    "llava": _CLIP,
    "llava_next": _CLIP,
    "llava_next_video": _CLIP,
    "llava_onevision": _SIGLIP,
    "video_llava": _CLIP,
    "vipllava": _CLIP | {"num_hidden_layers": 12},
    "idefics3": without(_SIGLIP, "model_type"),
    "smolvlm": without(_SIGLIP, "model_type"),
    "mistral3": _PIXTRAL,
    "lighton_ocr": _PIXTRAL,
    "internvl": without(_SIGLIP, "model_type") | {"model_type": "internvl_vision"},
    "got_ocr2": {
        "hidden_size": 8,
        "output_channels": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [0],
        "mlp_dim": 8,
    },
}


def text(draw: Random, number: int, kind: str) -> Config:
    """The configuration of the texts."""
    config = llama(draw, number) | {"model_type": kind, "rope_theta": theta(draw)}
    if kind == "mistral":
        config["sliding_window"] = draw.choice((None, 7))
    if kind == "qwen3_moe":
        sizes = {
            "moe_intermediate_size": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
        config |= {"decoder_sparse_step": 1, **sizes}
    if kind == "ministral3":
        config |= {"rope_parameters": rope(draw, kinds=("yarn",)) | {"llama_4_scaling_beta": 0.3}}
        return without(config, "rope_theta")
    return without(config, "head_dim") if kind == "qwen2" else config


def _wrapped(
    family: str, kinds: tuple[str, ...], places: tuple[str, ...] = ("outer", "inner")
) -> None:
    def maker(draw: Random, number: int) -> Config:
        inner = text(draw, number, kinds[number % len(kinds)])
        tied = inner.pop("tie_word_embeddings")
        outer: Config = {"text_config": inner, "vision_config": dict(_VISIONS[family])}
        if family == "ovis2":
            outer |= {key: inner[key] for key in ("hidden_size", "vocab_size")}
        for place, values in {"outer": outer, "inner": inner}.items():
            if place in places:
                values["tie_word_embeddings"] = tied
        return outer

    IMAGES[family] = maker


def _qwen(draw: Random, number: int, kind: str) -> Config:
    sections = {"type": "mrope", "mrope_section": [2, 1, 1] if number == 0 else [1, 1, 1]}
    config = llama(draw, number) | {"rope_theta": theta(draw), "rope_scaling": sections}
    return without(config, "head_dim") | {
        "hidden_size": 32 if number == 0 else 24,
        "num_attention_heads": 4,
    }


def qwen2_vl(draw: Random, number: int) -> Config:
    """Qwen2-VL and Qwen2.5-VL: old files have the keys of texts beside those of images."""
    inner = _qwen(draw, number, "qwen2") | {"num_key_value_heads": 2}
    if number % 3 == 1:
        inner |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    vision = _QWEN_VISION | {
        "out_hidden_size": inner["hidden_size"],
        "hidden_size": inner["hidden_size"],
    }
    return (
        {**inner, "vision_config": vision}
        if number % 4 == 0
        else {"text_config": inner, "vision_config": vision}
    )


def qwen3_vl(draw: Random, number: int) -> Config:
    """Qwen3-VL."""
    rope_of = {
        "rope_type": "default",
        "rope_theta": theta(draw),
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    inner = without(llama(draw, number), "tie_word_embeddings") | {
        "rope_parameters": rope_of,
        "head_dim": 8,
    }
    inner |= {"attention_bias": draw.random() < 0.4}
    vision = _QWEN_VISION | {"out_hidden_size": inner["hidden_size"]}
    return {
        "text_config": inner,
        "vision_config": vision,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def _sections(draw: Random) -> Config:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta(draw),
            "mrope_section": [1, 1, 0],
        }
    }


def glm4v(draw: Random, number: int) -> Config:
    """GLM-4.1V: half of each head is rotated."""
    inner = without(llama(draw, number), "head_dim", "tie_word_embeddings") | _sections(draw)
    inner |= {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "model_type": "glm4v_text",
    }
    inner["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    vision = _GLM_VISION | {"out_hidden_size": 32}
    return {"text_config": inner, "vision_config": vision, "tie_word_embeddings": number == 1}


def glm46v(draw: Random, number: int) -> Config:
    """GLM-4.6V, with the part for images of GLM-4.1V."""
    config = glm4v(draw, number)
    return config | {"vision_config": config["vision_config"] | {"model_type": "glm4v_vision"}}


def glm4v_moe(draw: Random, number: int) -> Config:
    """GLM-4.5V."""
    inner = without(
        glm4_moe(draw, number),
        "use_qk_norm",
        "rope_theta",
        "partial_rotary_factor",
        "tie_word_embeddings",
    )
    inner |= _sections(draw)
    inner["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    vision = _GLM_VISION | {"out_hidden_size": inner["hidden_size"]}
    return {"text_config": inner, "vision_config": vision, "tie_word_embeddings": number == 1}


def aria(draw: Random, number: int) -> Config:
    """Aria."""
    inner = without(aria_text(draw, number), "tie_word_embeddings") | {"model_type": "aria_text"}
    vision = without(_SIGLIP, "model_type") | {"model_type": "idefics3_vision"}
    return {
        "text_config": inner,
        "vision_config": vision,
        "projector_patch_to_query_dict": {"4": 2},
    }


def cohere2_vision(draw: Random, number: int) -> Config:
    """Command A Vision and Aya Vision."""
    inner = cohere2(draw, number) | {"model_type": "cohere2"}
    return {"text_config": without(inner, "tie_word_embeddings"), "vision_config": dict(_SIGLIP)}


def exaone4_5(draw: Random, number: int) -> Config:
    """EXAONE 4.5."""
    inner = without(exaone4(draw, number), "tie_word_embeddings", "sliding_window_pattern") | {
        "model_type": "exaone4"
    }
    vision = _VISIONS["exaone4_5"] | {"out_hidden_size": inner["hidden_size"]}
    return {"text_config": inner, "vision_config": vision, "tie_word_embeddings": number == 1}


IMAGES: dict[str, Callable[[Random, int], Config]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "glm4v": glm4v,
    "glm4v_moe": glm4v_moe,
    "glm46v": glm46v,
    "aria": aria,
    "cohere2_vision": cohere2_vision,
    "aya_vision": cohere2_vision,
    "exaone4_5": exaone4_5,
}
for _family in ("llava", "llava_next", "llava_next_video", "video_llava", "vipllava"):
    _wrapped(_family, ("llama", "mistral", "qwen2"))
_wrapped("llava_onevision", ("qwen2", "llama"))
_wrapped("idefics3", ("llama", "mistral"), ("outer",))
_wrapped("smolvlm", ("llama", "mistral"), ("outer",))
_wrapped("mistral3", ("mistral", "ministral3"), ("outer",))
_wrapped("internvl", ("qwen2", "qwen3", "qwen3_moe", "llama"), ("outer",))
_wrapped("lighton_ocr", ("qwen3",), ("outer",))
_wrapped("got_ocr2", ("qwen2",), ("outer",))
_wrapped("deepseek_vl", ("llama",), ("outer",))
_wrapped("ovis2", ("qwen2", "llama"), ("outer",))
_wrapped("video_llama_3", ("qwen2",), ("outer",))
