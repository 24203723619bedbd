"""Llama, and families that differ from it in defaults, biases, windows or rotary positions."""

from typing import Any

from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, BIASES, Fields, flag, off
from orca_jax.model.families.names import JOINED_GATE
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_int, refusal
from orca_jax.model.families.windows import read_layer_types, window, windows, windows_of_qwen
from orca_jax.values.config import ModelConfig

_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_TEMPERED = RopeRules(
    default=_YARN,
    notes=frozenset({"max_position_embeddings"}),
    temperature_key="llama_4_scaling_beta",
)
"""Queries have a factor that grows with their positions."""
_PHI3_ROPE = RopeRules(
    share=1.0, original=4096, renamed={"su": "longrope"}, kinds=("default", "longrope")
)


def _in_all_layers(hf: HfConfig, config: ModelConfig) -> tuple[bool, ...]:
    """The layers of Ministral with a window, if there is one."""
    return (hf.get("sliding_window", 4096) is not None,)


def _smollm3(hf: HfConfig, config: ModelConfig) -> Fields:
    """The layers without positions. There are no windows."""
    layers = config.num_layers
    period = get_int(hf, "no_rope_layer_interval", 4)
    ropes = hf.get("no_rope_layers")
    if ropes is None:
        ropes = [int((layer + 1) % period != 0) for layer in range(layers)]
    if (
        not isinstance(ropes, list)
        or len(ropes) != layers
        or not all(type(each) is int and each in (0, 1) for each in ropes)
    ):
        raise refusal(
            "no_rope_layers",
            f"must be a list of {layers} numbers, 1 for a layer with positions and 0",
            ropes,
        )
    read_layer_types(hf, layers, ("full_attention", "full_attention"))
    return {"rope": tuple(config.rope if rotated else None for rotated in ropes)}


LLAMAS = (
    Family("llama", (BIASES,)),
    Family("internlm3", (BIASES,), aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    Family(
        "iquestcoder",
        (BIASES,),
        fixed={"clip_qkv": (None,)},
        unread="max_window_layers",  # of windows, which are refused
    ),
    Family(
        "seed_oss",
        (
            {
                "attention_bias": flag("attention_bias", True),
                "attention_out_bias": flag("attention_out_bias"),
                "mlp_bias": flag("mlp_bias"),
            },
        ),
        unread="residual_dropout",
    ),
    Family(
        "cwm",
        ({"mlp_bias": flag("mlp_bias")}, windows((False, True, True, True), 8192)),
        shape=LlamaShape(rules=RopeRules(default=_LLAMA3)),
    ),
    Family(
        "smollm3",
        (BIASES, _smollm3),
        unread="max_window_layers",  # of windows, which are refused
    ),
    Family("qwen2", ({"attention_bias": True}, windows_of_qwen()), fixed=off("use_mrope")),
    Family("qwen3", (ATTENTION_BIASES, {"qk_norm": "head"}, windows_of_qwen())),
    Family("mistral", (window(4096),)),
    Family("ministral", (windows(_in_all_layers),)),
    Family("ministral3", (window(None),), shape=LlamaShape(rules=_TEMPERED)),
    Family(
        "phi3",
        (window(None),),
        f"{JOINED_GATE} self_attn.qkv_proj attention.{{query,key,value}}",
        shape=LlamaShape(rules=_PHI3_ROPE),
        fixed={
            **off("attention_bias lm_head_bias mlp_bias"),
            "full_attn_mod": (1, None),
            "interpolate_factor": (1, None),
        },
    ),
    Family(
        "apertus",
        (ATTENTION_BIASES, {"activation": "xielu", "gated_mlp": False, "qk_norm": "head"}),
        """
        {attention,feedforward}_layernorm       {attention,mlp}_norm
        mlp.act_fn.{alpha_p,alpha_n,beta,eps}   mlp.xielu.{positive,negative,slope,least}
        """,
        shape=LlamaShape(
            activation_key=None,
            rules=RopeRules(default={**_LLAMA3, "rope_theta": 12e6, "factor": 8.0}),
        ),
        fixed={"hidden_act": ("xielu", None)},
    ),
)
