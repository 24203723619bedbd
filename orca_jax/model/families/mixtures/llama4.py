"""Llama 4 for texts: experts of weighted inputs, layers without positions, and rotated heads of unit length.

Rotated layers see the tokens of their own chunk of `attention_chunk_size` alone, and the other ones have another
temperature after `floor_scale` tokens. Texts are at most as long as neither has an effect.
"""

from dataclasses import replace
from typing import Any

from orca_jax.model.families import llama
from orca_jax.model.families.base import Weight, paired, rows_if, words
from orca_jax.model.families.dense.near import LlamaShape, near_llama
from orca_jax.model.families.experts import HARMLESS, joined_experts, read_experts
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.model.families.windows import read_layer_types
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig

_MLP = "layers.{layer}.feed_forward"
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


def _fields(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
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
        **llama.attention_biases(hf),
        "max_positions": _longest(hf, config, has_rope),
        "rope": positions,
        "rope_pattern": has_rope,
        "experts": _experts(hf, config),
    }


def _experts(hf: HfConfig, config: ModelConfig) -> ExpertsConfig:
    layers = config.num_layers
    step = get_int(hf, "interleave_moe_layer_step", 1)
    sparse = _numbers(hf, "moe_layers", range(layers), list(range(step - 1, layers, step)))
    if not sparse:
        key = "interleave_moe_layer_step" if hf.get("moe_layers") is None else "moe_layers"
        raise refusal(key, f"must leave a layer of {layers} with experts", hf.get(key))
    experts = read_experts(
        hf, "num_local_experts", (16, 1), is_normalised=False, shared_dim=config.mlp_dim
    )
    if experts.per_token != 1:
        raise refusal("num_experts_per_tok", "must be 1", experts.per_token)
    dense = tuple(set(range(layers)) - set(sparse))
    width = get_int(hf, "intermediate_size_mlp", 16384)
    return replace(
        experts,
        weighs_inputs=True,
        shared_gate=False,
        router=RouterConfig("sigmoid"),
        dense_layers=tuple(sorted(dense)),
        dense_dim=width if dense else 0,
    )


def _weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Checkpoint keys -> parameters."""
    assert config.experts is not None, "the family has experts"
    experts = f"{_MLP}.experts"
    return (
        *paired(llama.weights_beside_mlp(config), config),
        Weight(f"{_MLP}.router.weight", "blocks.mlp.router", transpose=True),
        *joined_experts(
            f"{experts}.gate_up_proj", f"{experts}.down_proj", config.mlp_dim, transpose=False
        ),
        *llama.mlp_weights(f"{_MLP}.shared_expert", "blocks.mlp.shared.mlp", bias=False),
        *rows_if(
            config.experts.dense_layers, *llama.mlp_weights(_MLP, "blocks.dense_mlp", bias=False)
        ),
    )


LLAMA4_TEXT = near_llama(
    "llama4_text",
    "Llama 4 Scout and Maverick, up to 8,191 tokens",
    "Llama4",
    LlamaShape(
        1e-5,
        # Others have a factor on angles, which the norm after them would take back in transformers.
        rules=RopeRules(theta=5e5, kinds=("default", "linear", "llama3")),
    ),
    _fields,
    words(
        "attention_bias attention_chunk_size attn_temperature_tuning floor_scale interleave_moe_layer_step "
        "intermediate_size_mlp layer_types moe_layers no_rope_layer_interval no_rope_layers num_experts_per_tok "
        "num_local_experts use_qk_norm"
    ),
    _weights,
    aliases={"num_experts": "num_local_experts"},
    harmless=HARMLESS | {"attn_scale", "for_llm_compression"},
    architectures=("Llama4ForCausalLM", "Llama4TextModel"),
)
