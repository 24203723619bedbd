"""Qwen3-Next and Qwen3.5: three of four layers have the gated delta rule, the others attention with gates.

Both have experts, and Qwen3.5 also models without. Columns of the delta rule are joined in Qwen3-Next by key head.
"""

import re
from dataclasses import replace

from orca_jax.model.families.experts import EVERY_LAYER, OF_ROUTERS, Mixture, shared_expert
from orca_jax.model.families.family import IGNORED, PREFIXES, Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields, flag, only_silu
from orca_jax.model.families.names import EXPERTS, SHARED_EXPERT, STACKED_EXPERTS
from orca_jax.model.families.rope import SECTIONS, RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_conv_width, get_int, refusal
from orca_jax.model.families.windows import read_layer_types
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import DeltaRuleConfig, MixerName

_FULL, _LINEAR = _TYPES = "full_attention", "linear_attention"
_MIXERS: dict[str, MixerName] = {_FULL: "attention", _LINEAR: "delta_rule"}


def _mixers(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields of layers with attention and with the gated delta rule."""
    interval = get_int(hf, "full_attention_interval", 4)
    kinds = read_layer_types(hf, config.num_layers, _TYPES)
    kinds = kinds or [
        _LINEAR if (layer + 1) % interval else _FULL for layer in range(config.num_layers)
    ]
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    if _LINEAR not in kinds:
        return {"mixer": mixers}
    return {"mixer": mixers, "delta_rule": _delta_rule(hf)}


def _delta_rule(hf: HfConfig) -> DeltaRuleConfig:
    heads = get_int(hf, "linear_num_value_heads", 32)
    keys = get_int(hf, "linear_num_key_heads", 16)
    if heads % keys:
        raise refusal(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads {keys}", heads
        )
    width = get_conv_width(hf, "linear_conv_kernel_dim", 4)
    dims = get_int(hf, "linear_key_head_dim", 128), get_int(hf, "linear_value_head_dim", 128)
    return DeltaRuleConfig(heads, keys, *dims, width)


_FIELDS = (
    ATTENTION_BIASES,
    {"qk_norm": "head", "norm_offset": 1.0, "attention_gate": "all"},
    only_silu,
    _mixers,
)
_DELTA_RULE = """
    self_attn.q_proj                attention.{query,gate}          by=heads
    linear_attn.conv1d              delta.{query,key,value}_taps
    linear_attn.{A_log,dt_bias}     delta.{rate,step_bias}
    linear_attn.norm                delta.norm
    linear_attn.out_proj            delta.out
"""
_NEXT_NAMES = f"""
    {EXPERTS}
    {SHARED_EXPERT}
    {_DELTA_RULE}
    linear_attn.in_proj_qkvz        delta.{{query,key,value,gate}}      by=key_heads
    linear_attn.in_proj_ba          delta.{{beta,step}}                 by=key_heads
"""
_NAMES = f"""
    {STACKED_EXPERTS}
    {SHARED_EXPERT}
    {_DELTA_RULE}
    linear_attn.in_proj_qkv         delta.{{query,key,value}}
    linear_attn.in_proj_{{z,b,a}}   delta.{{gate,beta,step}}
"""
_IGNORED = re.compile(rf"{IGNORED}|mtp\..*")
_UNREAD = "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"
QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    _FIELDS,
    _NAMES,
    shape=LlamaShape(rules=RopeRules(share=0.25, renamed={"mrope": "default"}, notes=SECTIONS)),
    prefixes=("model.language_model.", *PREFIXES),
    ignored=_IGNORED,
    # the second one is of the delta rule, in Qwen3.6
    fixed={"attn_output_gate": (True, None), "output_gate_type": ("swish", "silu", None)},
    unread=_UNREAD,
)
NEXTS = (
    Family(
        "qwen3_next",
        (
            *_FIELDS,
            Mixture(
                "num_experts",
                (512, 10),
                512,
                is_normalised=flag("norm_topk_prob", True),
                shared=shared_expert(512),
            ),
        ),
        _NEXT_NAMES,
        shape=LlamaShape(rules=RopeRules(share=0.25)),
        ignored=_IGNORED,
        fixed=EVERY_LAYER,
        unread=OF_ROUTERS,
    ),
    QWEN3_5_TEXT,
    replace(
        QWEN3_5_TEXT,
        name="qwen3_5_moe_text",
        fields=(*_FIELDS, Mixture("num_experts", (256, 8), 512, shared=shared_expert(512))),
        unread=OF_ROUTERS + _UNREAD,
    ),
)
