"""Families in which some layers have no positions: SmolLM 3 and EXAONE 4."""

from typing import Any

from orca_jax.model.families.dense.near import BIASES, LlamaShape, biases, near_llama
from orca_jax.model.families.rope import RopeRules
from orca_jax.model.families.values import HfConfig, get_int, refusal
from orca_jax.model.families.windows import Windows, read_layer_types, windows_of_gemma
from orca_jax.values.config import ModelConfig


def _smollm3(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    period = get_int(hf, "no_rope_layer_interval", 4)
    ropes = hf.get("no_rope_layers")
    layers = config.num_layers
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
    return {**biases(hf), "rope_pattern": tuple(map(bool, ropes))}


def rotated_windows(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields for windows of an EXAONE. With windows, only layers that have one have a rope."""
    has_window = hf.get("sliding_window", 4096) is not None
    if not has_window:
        read_layer_types(hf, config.num_layers, ("full_attention", "full_attention"))
        return {}
    # The pattern has no effect beside `layer_types`, and may then be a text.
    period = 4 if hf.get("layer_types") is not None else get_int(hf, "sliding_window_pattern", 4)
    windows: Windows = windows_of_gemma(hf, config.num_layers, config.max_positions, period)
    return {**windows._asdict(), "rope_pattern": windows.window_pattern}


def _exaone4(hf: HfConfig, config: ModelConfig) -> dict[str, Any]:
    return {**rotated_windows(hf, config), "residual": "post_norm", "qk_norm": "head"}


SMOLLM3 = near_llama(
    "smollm3",
    "SmolLM 3",
    "SmolLM3",
    LlamaShape(rules=RopeRules(theta=2e6), is_tied=True),
    _smollm3,
    BIASES | {"layer_types", "no_rope_layer_interval", "no_rope_layers"},
    harmless=frozenset({"max_window_layers"}),  # of windows, which are refused
)
EXAONE4 = near_llama(
    "exaone4",
    "EXAONE 4",
    "Exaone4",
    LlamaShape(1e-5),
    _exaone4,
    frozenset({"layer_types", "sliding_window", "sliding_window_pattern"}),
)
PARTLY_ROTATED = (SMOLLM3, EXAONE4)
