"""Gemma 1 to 3 for texts. From the second on there are norms before and after attention and MLP, and windows.

Scales of norms are stored as their difference from one. Gemma 2 caps scores and logits. Gemma 3 has norms of queries
and keys instead, and other rotary positions in layers with a window. VaultGemma is Gemma 2 without norms after parts.
"""

import re
from dataclasses import replace

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields, number_or_none, root_of_width
from orca_jax.model.families.keys import read_text
from orca_jax.model.families.names import BOTH_NORMS
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_float, refusal
from orca_jax.model.families.windows import all_but_each, windowed_rope, windows
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

_GLOBAL = RopeRules(part="full_attention", kinds=("default", "linear"))
_LOCAL = RopeRules(
    theta_key="rope_local_base_freq", part="sliding_attention", kinds=("default", "linear")
)


def _tanh(hf: HfConfig, config: ModelConfig) -> Fields:
    """The activation; gelu is an approximation, as in transformers."""
    if config.activation == "gelu":
        return {"activation": "gelu_tanh"}
    return {}


def _scores(hf: HfConfig, config: ModelConfig) -> Fields:
    """The factor on scores."""
    return {"attention_scale": get_float(hf, "query_pre_attn_scalar", 256.0) ** -0.5}


_BOTH_NORMS = (
    ATTENTION_BIASES,
    {"residual": "both_norms", "norm_offset": 1.0},
    _scores,
    root_of_width(),
)
_SHAPE = LlamaShape(activation="gelu_pytorch_tanh")
_CAUSAL = {"use_bidirectional_attention": (False, None)}
GEMMA2 = Family(
    "gemma2",
    (
        *_BOTH_NORMS,
        {
            "attention_soft_cap": number_or_none("attn_logit_softcapping", 50.0),
            "logit_soft_cap": number_or_none("final_logit_softcapping", 30.0),
        },
        windows(all_but_each(2)),
    ),
    BOTH_NORMS,
    shape=_SHAPE._replace(activation_key="hidden_activation"),
    fixed=_CAUSAL,
    # `hidden_act` is not read by transformers either, and neither are these notes of the windows.
    unread="_sliding_window_pattern cache_implementation hidden_act sliding_window_size",
)
_GEMMA3_TEXT = replace(
    GEMMA2,
    name="gemma3_text",
    shape=_SHAPE._replace(activation_key="hidden_activation", rules=_GLOBAL),
    fields=(
        *_BOTH_NORMS,
        {"qk_norm": "head", "logit_soft_cap": number_or_none("final_logit_softcapping")},
        windows(all_but_each(6, "sliding_window_pattern")),
        windowed_rope(_LOCAL),
    ),
    fixed={**_CAUSAL, "attn_logit_softcapping": (None,)},
)


class _Gemma3(Family):
    """Gemma 3 for images and texts, whose part for texts is served."""

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read the texts' part of a config.json, `text_config`; raises as in `Family`."""
        text = hf.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise refusal("text_config", "must be an object or null", text)
        # The head and the end tokens are those of the whole model.
        outer = {
            key: hf.get(key) for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id")
        }
        whole = {
            "model_type": "gemma3_text",
            **(text or {}),
            **{key: value for key, value in outer.items() if key in hf},
        }
        if whole["model_type"] != "gemma3_text":
            raise refusal(
                "text_config", "must have the model_type gemma3_text", whole["model_type"]
            )
        if whole.get("final_logit_softcapping") is not None:
            problem = (
                "final_logit_softcapping must be null: transformers' models for images and texts do not "
                "cap logits"
            )
            raise ConfigError(
                f"config.json: text_config: {problem}", param="final_logit_softcapping"
            )
        return replace(read_text(whole, _GEMMA3_TEXT), family="gemma3")


GEMMAS = (
    Family(
        "gemma",
        (ATTENTION_BIASES, _tanh, root_of_width(), {"norm_offset": 1.0}),
        shape=_SHAPE,
        fixed=_CAUSAL,
        unread="hidden_activation",  # not read by transformers either
    ),
    GEMMA2,
    replace(
        GEMMA2,
        name="vaultgemma",
        fields=(*GEMMA2.fields, {"residual": "pre_norm"}),
        names="pre_feedforward_layernorm mlp_norm",
    ),
    _GEMMA3_TEXT,
    _Gemma3(
        "gemma3",
        # An untied head may be inside or outside the model of texts.
        names=BOTH_NORMS + "language_model.lm_head head or",
        needed={"text_config": {}},
        prefixes=("language_model.model.", "model.language_model.", "language_model."),
        ignored=re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
        unread="boi_token_index eoi_token_index image_token_index mm_tokens_per_image vision_config",
    ),
)
