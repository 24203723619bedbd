"""Reading of sliding windows. All layers have the same window, or none; a mixture of both is refused."""

from orca_jax.checks import short
from orca_jax.errors import ConfigError
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal

QWEN_KEYS = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
"""The keys read by `window_of_layers`."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def window_of_all(hf: HfConfig, default: int | None, max_positions: int) -> int | None:
    """The window `sliding_window` of all layers, or None if each token sees all tokens before it.

    Args:
        hf: the configuration; null is no window.
        default: the window without a key.
        max_positions: a window of as many tokens has no effect.

    Raises:
        ConfigError: the value is not a positive integer or null.
    """
    missing = None if "sliding_window" in hf else default
    if hf.get("sliding_window") is None and missing is None:
        return None
    window = get_int(hf, "sliding_window", missing)
    return window if window < max_positions else None


def window_of_layers(hf: HfConfig, num_layers: int, max_positions: int) -> int | None:
    """The window of a Qwen: layers from `max_window_layers` on, or those named in `layer_types`, have one.

    Raises:
        ConfigError: a value is invalid, or only some layers have a window. The error names the key.
    """
    window = window_of_all(hf, 4096, max_positions)
    is_used = get_bool(hf, "use_sliding_window", False)
    first = get_count(hf, "max_window_layers", 28)
    sliding = [is_used and layer >= first for layer in range(min(num_layers, first + 1))]
    key, kinds = "max_window_layers", hf.get("layer_types")
    if kinds is not None:
        key = "layer_types"
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {_FULL, _SLIDING}:
            raise refusal(key, f"must be a list of {num_layers} names, {_FULL} or {_SLIDING}", kinds)
        sliding = [kind == _SLIDING for kind in kinds]
        if any(sliding) and (not is_used or hf.get("sliding_window", 4096) is None):
            raise refusal(key, f"has {_SLIDING}, but there is no window: set use_sliding_window, sliding_window", kinds)
    if not any(sliding) or window is None:
        return None
    if not all(sliding):
        raise ConfigError(
            f"config.json: {key} {short(hf.get(key))} gives some layers a sliding window and others none, which is not "
            "supported; all layers must be alike",
            param=key,
        )
    return window
