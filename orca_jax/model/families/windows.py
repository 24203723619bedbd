"""Reading of sliding windows and of `layer_types`: windows of all layers, and patterns of layers of several kinds."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from orca_jax.model.families.fields import Fields, Reader
from orca_jax.model.families.rope import RopeRules, read_rope
from orca_jax.model.families.values import HfConfig, get_bool, get_count, get_int, refusal
from orca_jax.values.config import ModelConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"

WindowPattern = tuple[bool, ...] | Callable[[HfConfig, ModelConfig], tuple[bool, ...]]
"""The layers with a window, which are repeated, or their reader."""


def read_window(hf: HfConfig, default: int | None) -> int | None:
    """The window `sliding_window`; None for null.

    Args:
        hf: the configuration.
        default: the window without a key.

    Raises:
        ConfigError: the value is not a positive integer or null.
    """
    if hf.get("sliding_window", default) is None:
        return None
    return get_int(hf, "sliding_window", default)


def without_idle_windows(config: ModelConfig) -> ModelConfig:
    """The configuration without windows as long as a text: they have no effect."""
    layers = [
        kind._replace(window=None) if kind.window and kind.window >= config.max_positions else kind
        for kind in config.layers
    ]
    return replace(config, layers=tuple(layers))


def has_windows(config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    return tuple(kind.window is not None for kind in config.layers)


def by_window[T](config: ModelConfig, windowed: T, full: T) -> tuple[T, ...]:
    """A value for each layer, by whether it has a window."""
    return tuple(windowed if has_window else full for has_window in has_windows(config))


def window(default: int | None) -> Reader:
    """A reader of the window of all layers; `default` is the window without a key."""
    return lambda hf, config: {"window": read_window(hf, default)}


def windows_of_qwen(first: int = 28) -> Reader:
    """A reader of the windows of a Qwen: of layers from `max_window_layers` on, or by `layer_types`.

    `first` is the default of `max_window_layers`.
    """

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        """Read the fields; raises `ConfigError`, which names the key."""
        number = config.num_layers
        window = read_window(hf, 4096)
        is_used = get_bool(hf, "use_sliding_window", False)
        start = get_count(hf, "max_window_layers", first)
        has_window = is_used and window is not None
        pattern = _pattern_of_types(hf, number, has_window=has_window)
        if pattern is None:
            pattern = tuple(is_used and layer >= start for layer in range(number))
        return {"window": _of_layers(pattern, window)}

    return read


def windows(pattern: WindowPattern, default: int | None = 4096) -> Reader:
    """A reader of the windows of `layer_types`, or else of the layers of `pattern`; `default` is that of the window."""

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        """Read the fields; raises `ConfigError`, which names the key."""
        usual = pattern(hf, config) if callable(pattern) else pattern
        window = read_window(hf, default)
        found = _pattern_of_types(hf, config.num_layers, has_window=window is not None)
        if found is None and any(usual) and window is None:
            raise refusal(
                "sliding_window", "must be a positive integer for layers with a window", None
            )
        return {"window": _of_layers(found or usual, window)}

    return read


def all_but_each(period: int, key: str | None = None) -> WindowPattern:
    """All layers but the last one of each period, whose length may have a key."""

    def read(hf: HfConfig, config: ModelConfig) -> tuple[bool, ...]:
        length = period if key is None else get_int(hf, key, period)
        if length > config.num_layers:
            return (True,)
        return (True,) * (length - 1) + (False,)

    return read


def windowed_rope(rules: RopeRules) -> Reader:
    """A reader of the rotary positions of layers with a window. Windows are read before."""

    def read(hf: HfConfig, config: ModelConfig) -> Fields:
        """Read the fields; raises `ConfigError`, which names the key."""
        rope, _ = read_rope(hf, config.head_dim, config.max_positions, rules)
        return {"rope": by_window(config, rope, config.rope)}

    return read


def rotated_windows(hf: HfConfig, config: ModelConfig) -> Fields:
    """The field of models in which only layers with a window have positions."""
    return {"rope": by_window(config, config.rope, None)}


def _of_layers(pattern: tuple[bool, ...], window: int | None) -> tuple[int | None, ...]:
    """The windows of the layers of a pattern."""
    return tuple(window if has_window else None for has_window in pattern)


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
