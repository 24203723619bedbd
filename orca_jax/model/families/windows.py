"""Reading of sliding windows and of `layer_types`: windows of all layers, and patterns of layers of several kinds."""

from collections.abc import Collection
from typing import Any, NamedTuple

from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal

QWEN_KEYS = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
"""The keys read by `windows_of_qwen`."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Windows(NamedTuple):
    """The window of a model, and the layers that have it, as in `ModelConfig`."""

    sliding_window: int | None
    window_pattern: tuple[bool, ...] = (True,)


def window_of_all(hf: HfConfig, default: int | None, max_positions: int) -> int | None:
    """The window `sliding_window` of all layers, or None if each token sees all tokens before it.

    Args:
        hf: the configuration; null is no window.
        default: the window without a key.
        max_positions: a window of as many tokens has no effect.

    Raises:
        ConfigError: the value is not a positive integer or null.
    """
    if hf.get("sliding_window", default) is None:
        return None
    window = get_int(hf, "sliding_window", default)
    return window if window < max_positions else None


def windows_of_qwen(hf: HfConfig, num_layers: int, max_positions: int, first: int = 28) -> Windows:
    """The windows of a Qwen: layers from `max_window_layers` on, or those named in `layer_types`, have one.

    `first` is the default of `max_window_layers`.

    Raises:
        ConfigError: a value is invalid. The error names the key.
    """
    window = window_of_all(hf, 4096, max_positions)
    is_used = get_bool(hf, "use_sliding_window", False)
    first = get_count(hf, "max_window_layers", first)
    pattern = _pattern_of_types(
        hf, num_layers, has_window=is_used and hf.get("sliding_window", 4096) is not None
    )
    if pattern is None:
        if not is_used or first >= num_layers or window is None:
            return Windows(None)
        pattern = num_layers * (True,)
        pattern = (False,) * first + pattern[first:]
    if window is None or not any(pattern):
        return Windows(None)
    if all(pattern):
        return Windows(window)
    return Windows(window, pattern)


def windows_of_gemma(hf: HfConfig, num_layers: int, max_positions: int, period: int) -> Windows:
    """The windows of a Gemma: those of `layer_types`, or of all layers but the last one of each `period`.

    Raises:
        ConfigError: a value is invalid. The error names the key.
    """
    return windows_of_pattern(hf, num_layers, max_positions, all_but_each(period, num_layers))


def all_but_each(period: int, num_layers: int) -> tuple[bool, ...]:
    """The pattern of windows in all layers but the last one of each `period`."""
    if period > num_layers:
        return (True,)
    return (True,) * (period - 1) + (False,)


def windows_of_pattern(
    hf: HfConfig,
    num_layers: int,
    max_positions: int,
    pattern: tuple[bool, ...],
    default: int | None = 4096,
) -> Windows:
    """The windows of `layer_types`, or else of the layers of `pattern`, which is repeated.

    Raises:
        ConfigError: a value is invalid. The error names the key.
    """
    window = window_of_all(hf, default, max_positions)
    has_window = hf.get("sliding_window", default) is not None
    found = _pattern_of_types(hf, num_layers, has_window=has_window)
    if found is None and any(pattern) and not has_window:
        raise refusal("sliding_window", "must be a positive integer for layers with a window", None)
    return Windows(window, found or pattern)


def _pattern_of_types(
    hf: HfConfig, num_layers: int, *, has_window: bool
) -> tuple[bool, ...] | None:
    """The pattern of `layer_types`; None without this key."""
    kinds = read_layer_types(hf, num_layers, (_FULL, _SLIDING))
    if kinds is None:
        return None
    if _SLIDING in kinds and not has_window:
        problem = f"has {_SLIDING}, but there is no window: set sliding_window, and use_sliding_window of a Qwen"
        raise refusal("layer_types", problem, kinds)
    return tuple(kind == _SLIDING for kind in kinds)


def read_layer_types(hf: HfConfig, num_layers: int, known: Collection[str]) -> list[str] | None:
    """The kind of each layer; None without this key.

    Raises:
        ConfigError: it is not a list of known kinds, one for each layer.
    """
    kinds: Any = hf.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(kind in known for kind in kinds)
    ):
        names = f"{', '.join(list(known)[:-1])} or {list(known)[-1]}"
        raise refusal("layer_types", f"must be a list of {num_layers} names, {names}", kinds)
    return kinds
