"""Typed reading of the values of a config.json. A value of another type is refused, never converted."""

from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError

HfConfig = Mapping[str, Any]
"""The contents of a Hugging Face config.json."""

Activation = Literal["gelu_tanh", "gelu", "silu", "relu", "relu2"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}

_MOST_LAYERS = 10_000  # the shapes and the names of all layers are listed before any is built
_LEAST, _MOST = 1e-30, 1e30  # the rest of float32 is lost by one division


def refusal(key: str, problem: str, value: object) -> ConfigError:
    """The error for a wrong value of config.json. It names the file, the key and the value."""
    return ConfigError(f"config.json: {key} {problem}, got {short(value)}", param=key)


def get_int(hf: HfConfig, key: str, default: int | None = None) -> int:
    """A positive integer of at most 31 bits. Null counts as missing.

    Raises:
        ConfigError: it is missing without a default, or has another value. The error names the key.
    """
    return _integer(hf, key, default, 1, "must be a positive integer below 2**31")


def get_layers(hf: HfConfig, key: str, default: int) -> int:
    """A number of layers, from 1 to 10,000; raises `ConfigError` as `get_int` does."""
    number = get_int(hf, key, default)
    if number > _MOST_LAYERS:
        raise refusal(key, f"must be at most {_MOST_LAYERS}", number)
    return number


def get_conv_width(hf: HfConfig, key: str, default: int) -> int:
    """The tokens of a convolution, at least 2; raises `ConfigError` as `get_int` does."""
    width = get_int(hf, key, default)
    if width < 2:
        raise refusal(key, "must be at least 2", width)
    return width


def get_count(hf: HfConfig, key: str, default: int) -> int:
    """An integer from 0 on, of at most 31 bits; raises `ConfigError` as `get_int` does."""
    return _integer(hf, key, default, 0, "must be an integer from 0 to 2**31 - 1")


def _integer(hf: HfConfig, key: str, default: int | None, least: int, problem: str) -> int:
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise refusal(key, problem, value)
    return value


def get_float(hf: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number; raises `ConfigError` as `get_int` does."""
    value = hf.get(key)
    if value is None:
        value = default
    if not is_number(value) or not _LEAST <= value <= _MOST:
        raise refusal(key, f"must be a positive number in [{_LEAST}, {_MOST}]", value)
    return float(value)


def get_optional_float(hf: HfConfig, key: str, default: float | None = None) -> float | None:
    """A positive number, or None for null; raises `ConfigError` for other values. A missing key has the default."""
    if hf.get(key, default) is None:
        return None
    return get_float(hf, key, default)


def get_cap(hf: HfConfig, key: str, default: float | None = None) -> float | None:
    """A positive number, or None for null and 0; a missing key has the default.

    Raises `ConfigError` for other values.
    """
    value = hf.get(key, default)
    if is_number(value) and value == 0:
        return None
    return get_optional_float(hf, key, default)


def layer_list(key: str, value: Any, num_layers: int) -> list[int]:
    """Some layers, which `key` names by their numbers; raises `ConfigError` for other values."""
    layers = range(num_layers)
    if (
        not isinstance(value, list)
        or not value
        or not all(type(each) is int and each in layers for each in value)
    ):
        raise refusal(key, f"must be a list of some of the {num_layers} layers", value)
    return value


def get_floats(hf: HfConfig, key: str, default: list[float] | None = None) -> tuple[float, ...]:
    """A list of positive numbers; raises `ConfigError` for other values, and for none without a default."""
    values = hf.get(key, default)
    if not isinstance(values, list) or not all(
        is_number(value) and _LEAST <= value <= _MOST for value in values
    ):
        raise refusal(key, "must be a list of positive numbers", values)
    return tuple(map(float, values))


def get_bool(hf: HfConfig, key: str, default: bool) -> bool:
    """True or false; raises `ConfigError` for other values. Null counts as missing."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refusal(key, "must be true or false, without quotes", value)
    return value


def get_activation(hf: HfConfig, key: str | None, default: str) -> Activation:
    """The activation; raises `ConfigError` for an unknown name. Null counts as missing; without a key it is fixed."""
    if key is None:
        return _ACTIVATIONS[default]
    name = hf.get(key)
    if name is None:
        name = default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise refusal(key, f"must be one of {', '.join(sorted(_ACTIVATIONS))}", name)
    return _ACTIVATIONS[name]


def token_ids(
    value: object, key: str = "eos_token_id", file: str = "config.json"
) -> tuple[int, ...]:
    """One id, a list of ids, or null, as a tuple; raises `ConfigError` for other values."""
    ids = value if isinstance(value, list) else [value]
    if value is None:
        return ()
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
    ):
        message = (
            f"{file}: {key} must be a token id, a list of token ids or null, got {short(value)}"
        )
        raise ConfigError(message, param=key)
    return tuple(ids)


def first_token_id(hf: HfConfig, key: str) -> int | None:
    """The first of the ids under `key`, or None."""
    return next(iter(token_ids(hf.get(key), key)), None)


def is_number(value: object) -> TypeGuard[float]:
    """True for an integer or a float, false for a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_same(value: object, other: object) -> bool:
    """Equality that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
