"""Llama 4 for texts: experts of weighted inputs, layers without positions, and rotated heads of unit length.

Rotated layers see the tokens of their own chunk of `attention_chunk_size` alone, and the other ones have another
temperature after `floor_scale` tokens. Texts are at most as long as neither has an effect.
"""

from dataclasses import replace

from orca_jax.model.families.experts import OF_ROUTERS, Mixture, dense_layers
from orca_jax.model.families.family import Family
from orca_jax.model.families.fields import ATTENTION_BIASES, Fields
from orca_jax.model.families.names import NEIGHBOURS
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.shape import LlamaShape
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.model.families.windows import read_layer_types
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import RouterConfig

_KINDS = ("chunked_attention", "full_attention")


def _numbers(hf: HfConfig, key: str, allowed: range, default: list[int]) -> list[int]:
    """A list of integers of a range; the default in place of null."""
    values = hf.get(key)
    if values is None:
        values = default
    if not isinstance(values, list) or any(
        type(value) is not int or value not in allowed for value in values
    ):
        raise refusal(
            key, f"must be a list of integers from {allowed.start} to {allowed.stop - 1}", values
        )
    return values


def _longest(hf: HfConfig, config: ModelConfig, has_rope: tuple[bool, ...]) -> int:
    """The most tokens of a text with plain attention in all layers."""
    read_layer_types(hf, config.num_layers, _KINDS)
    limits = [config.max_positions]
    if hf.get("attention_chunk_size", 8192) is not None:
        limits.append(get_int(hf, "attention_chunk_size", 8192))
    is_tuned = hf.get("attn_temperature_tuning", True)
    start = get_int(hf, "floor_scale", 8192)
    if not isinstance(is_tuned, bool):
        is_tuned = get_count(hf, "attn_temperature_tuning", 1) > 0
    if is_tuned and not all(has_rope):  # a number in published files
        limits.append(start - 1)
    return min(limits)


def _positions(hf: HfConfig, config: ModelConfig) -> Fields:
    """The layers with rotary positions, and the most tokens."""
    layers = config.num_layers
    interval = get_int(hf, "no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in range(layers)]
    # 1: the layer has rotary positions
    rotated = _numbers(hf, "no_rope_layers", range(2), usual) or usual
    if len(rotated) < layers or not any(rotated[:layers]):
        raise refusal(
            "no_rope_layers", f"must have a number for each of {layers} layers, 1 for some", rotated
        )
    has_rope = tuple(map(bool, rotated[:layers]))
    assert config.rope is not None
    positions = config.rope
    if get_bool(hf, "use_qk_norm", True):
        positions = replace(positions, unit_eps=config.norm_eps)
    return {
        "max_positions": _longest(hf, config, has_rope),
        "rope": tuple(positions if rotated else None for rotated in has_rope),
    }


def _dense(hf: HfConfig, config: ModelConfig) -> Fields:
    """The fields of layers without experts, whose MLPs have a width of their own."""
    layers = config.num_layers
    step = get_int(hf, "interleave_moe_layer_step", 1)
    sparse = _numbers(hf, "moe_layers", range(layers), list(range(step - 1, layers, step)))
    if not sparse:
        key = "interleave_moe_layer_step" if hf.get("moe_layers") is None else "moe_layers"
        raise refusal(key, f"must leave a layer of {layers} with experts", hf.get(key))
    dense = tuple(sorted(set(range(layers)) - set(sparse)))
    return dense_layers(config, dense, get_int(hf, "intermediate_size_mlp", 16384))


def _experts(hf: HfConfig, config: ModelConfig) -> Fields:
    """The experts, of which a token goes through one."""
    options = {
        "weighs_inputs": True,
        "shared_gate": False,
        "shared_dim": config.mlp_dim,
        "router": RouterConfig("sigmoid"),
    }
    mlps = _dense(hf, config)
    found = Mixture("num_local_experts", (16, 1), is_normalised=False, options=options)(hf, config)
    if found["experts"].per_token != 1:
        raise refusal("num_experts_per_tok", "must be 1", found["experts"].per_token)
    return {**found, **mlps}


LLAMA4_TEXT = Family(
    "llama4_text",
    (ATTENTION_BIASES, _positions, _experts),
    f"""
    {NEIGHBOURS}
    feed_forward.{{gate,up,down}}_proj                  mlp.{{gate,up,down}}
    feed_forward.shared_expert.{{gate,up,down}}_proj    shared.{{gate,up,down}}
    feed_forward.router                                 experts.router
    feed_forward.experts.gate_up_proj[{{expert}}]       experts.{{gate,up}}     in_out
    feed_forward.experts.down_proj[{{expert}}]          experts.down            in_out
    """,
    # Others have a factor on angles, which the norm after them would take back in transformers.
    shape=LlamaShape(rules=RopeRules(kinds=("default", "linear", "llama3"))),
    aliases={"num_experts": "num_local_experts"},
    unread=OF_ROUTERS + "attn_scale for_llm_compression",
)
