"""A family that wraps another one: its `text_config` is the configuration of a family for texts.

Weights of the other parts, for images, sound and videos, are skipped by their names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orca_jax.model.families.base import Weight, with_change, words
from orca_jax.model.families.family import Family
from orca_jax.model.families.keys import read_text
from orca_jax.model.families.values import HfConfig, get_bool, refusal
from orca_jax.values.config import ModelConfig

_OUTER = ("eos_token_id", "bos_token_id")
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "language_model.",
    "model.",
    "",
)
_HEADS = ("language_model.lm_head.weight", "model.lm_head.weight")
_PARTS = (
    "aligner|audio_tower|connector|embed_audio|embed_tokens_extend|embed_vision|image_newline|image_tower|mlp1|"
    "mm_projector|multi_modal_projector|projector|video_tower|vision_embed_tokens|vision_embedder|"
    "vision_encoder|vision_model|vision_projection|vision_tower|visual|visual_embeddings_table|vq_adaptor"
)
_IGNORED = rf"(model\.)?({_PARTS})(\..*)?|.*layers\.\d+\.self_attn\.rotary_emb\.inv_freq|mtp\..*"
_OF_IMAGES = words(
    "adapter_layer_norm_eps alignment_intermediate_size audio_chunk_size audio_config audio_merge_size "
    "audio_token_id boa_token_id boa_token_index boi_token_id boi_token_index downsample_factor downsample_ratio "
    "eoa_token_id eoa_token_index eoi_token_id eoi_token_index ignore_index image_end_token_id "
    "image_grid_pinpoints image_seq_length image_start_token_id image_token_id image_token_index "
    "language_model_only mm_tokens_per_image multimodal_projector_bias projection_dim projector_hidden_act "
    "projector_layernorm_eps projector_pooling_ratio scale_factor spatial_merge_size spatial_pool_mode "
    "spatial_pool_stride use_image_newline_parameter video_end_token_id video_seq_length video_start_token_id "
    "video_token_id video_token_index vision_aspect_ratio vision_config vision_end_token_id vision_feature_layer "
    "vision_feature_select_strategy vision_start_token_id vision_token_id vision_use_cls_token "
    "visual_indicator_token_ids"
)
"""Keys of the parts for images and sound."""


@dataclass(frozen=True)
class Wrapper(Family):
    """The family of a model for images and texts.

    Attributes:
        texts: the families that the part for texts may have, by the `model_type` in `text_config`.
        default: the `model_type` of a `text_config` without one.
        tied: default of `tie_word_embeddings` beside `text_config`; None: a head is tied if either of both keys says
            so.
        is_flat: the keys of the texts may be beside those of images, in old files without `text_config`.
        layers: another name of the layers in files.
        of_images: keys without effect on texts, which are not those of texts in a flat file.
    """

    texts: Mapping[str, Family] = field(default_factory=dict)
    default: str = ""
    tied: bool | None = None
    is_flat: bool = False
    layers: str = "layers"
    of_images: frozenset[str] = frozenset()

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read the part for texts of a config.json; raises `ConfigError` as the family of the texts does."""
        text = _text(hf, self.of_images, is_flat=self.is_flat)
        kind = text.get("model_type", self.default)
        if not isinstance(kind, str) or kind not in self.texts:
            known = ", ".join(self.texts)
            raise refusal("text_config", f"must have one of the model_types {known}", kind)
        whole = {**text, "model_type": kind}
        is_tied = get_bool(hf, "tie_word_embeddings", self.tied or False)
        if is_tied or self.tied is not None:
            whole["tie_word_embeddings"] = is_tied
        whole |= {key: hf[key] for key in _OUTER if hf.get(key) is not None}
        config = read_text(whole, self.texts[kind])
        return replace(config, family=self.name, text_family=kind)

    def weights(self, config: ModelConfig) -> tuple[Weight, ...]:
        """The tensors of the texts. An untied head may be inside or outside of their part."""
        rows = [
            replace(row, others=(*row.others, row.key.replace("layers.", f"{self.layers}.", 1)))
            for row in self.texts[config.text_family or self.default].weights(config)
        ]
        return with_change(rows, "head.table", others=_HEADS)


def wrapper(
    name: str,
    texts: Mapping[str, Family],
    harmless: str = "",
    *,
    default: str = "",
    is_flat: bool = False,
    **options: Any,
) -> Wrapper:
    """A `Wrapper`.

    Args:
        name: the `model_type`.
        texts: see `Wrapper`.
        harmless: keys without effect on texts, beside `_OF_IMAGES`.
        default: see `Wrapper`; empty: the first of `texts`.
        is_flat: see `Wrapper`.
        options: other fields of `Wrapper`.
    """
    default = default or next(iter(texts))
    of_images = _OF_IMAGES | words(harmless)
    of_texts: frozenset[str] = frozenset()
    if is_flat:
        of_texts = of_texts.union(*(family.keys for family in texts.values()))
    ignored = sorted({family.ignored.pattern for family in texts.values()})
    return Wrapper(
        name,
        prefixes=_PREFIXES,
        ignored=re.compile("|".join([_IGNORED, *ignored])),
        has_further_layers=any(family.has_further_layers for family in texts.values()),
        unread=" ".join(sorted(of_images | of_texts)),
        needed={"text_config": texts[default].needed},
        texts=texts,
        default=default,
        is_flat=is_flat,
        of_images=of_images,
        **options,
    )


def _text(hf: HfConfig, of_images: frozenset[str], *, is_flat: bool) -> dict[str, Any]:
    """The configuration of the texts."""
    text = hf.get("text_config")
    if text is None and is_flat:
        kept = of_images | {"text_config", "model_type", "architectures", "auto_map"}
        return {key: value for key, value in hf.items() if key not in kept}
    if not isinstance(text, dict):
        raise refusal("text_config", "must be an object", text)
    return {key: value for key, value in text.items() if key not in ("architectures", "auto_map")}
