"""Reads the sampling defaults of a model from generation_config.json. Its end tokens are read with the model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_jax.bundled import is_preset
from orca_jax.errors import ConfigError, RequestError
from orca_jax.request import SamplingParams
from orca_jax.text.settings_file import read_settings

NAME = "generation_config.json"
MAX_NUMBER = 2**53  # absolute value; no field allows more

# Key of the file -> field of SamplingParams, and its type.
_FIELDS: Mapping[str, tuple[str, type[float] | type[int]]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_new_tokens": ("max_tokens", int),
}

logger = logging.getLogger(__name__)


def read_generation_defaults(source: str, setting: str) -> dict[str, float | int]:
    """Return the defaults of a request's sampling parameters, by the names of `SamplingParams`.

    Null values are ignored. `do_sample: false` means greedy sampling, so temperature 0. Other keys, such as beams or
    cache settings, are ignored, since they configure transformers.

    Args:
        source: the model directory; empty or "preset:<name>" for a preset.
        setting: "auto" reads the file in `source`, "none" and "vllm" read nothing, others are a directory or a file.

    Raises:
        ConfigError: the file or one of its values is wrong; the message names both. `param` is "generation_config".
    """
    if setting in ("none", "vllm") or (setting == "auto" and (not source or is_preset(source))):
        return {}
    directory = Path(source if setting == "auto" else setting)
    path = directory if directory.is_file() and setting != "auto" else directory / NAME
    if setting != "auto" and not path.is_file():
        message = f'{path} is missing; generation_config must be "auto", "none" or a directory with {NAME}'
        raise ConfigError(message, param="generation_config")
    values = read_settings(path, param="generation_config")
    defaults = {name: _number(values[key], kind, key, path) for key, (name, kind) in _FIELDS.items() if key in values}
    found = {name: number for name, number in defaults.items() if number is not None}
    if _is_greedy(values, path):
        found["temperature"] = 0.0
    _check(found, path)
    if found:
        logger.info("sampling defaults of the model: %s", found)
    return found


def _number(value: object, kind: type[float] | type[int], key: str, path: Path) -> float | int | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER:
        number = kind(value)
        if number == value:
            return number
    what = "an integer" if kind is int else "a number"
    raise ConfigError(f"{path}: {key} must be {what}, got {_short(value)}", param="generation_config")


def _is_greedy(values: Mapping[str, Any], path: Path) -> bool:
    value = values.get("do_sample")
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{path}: do_sample must be true or false, got {_short(value)}", param="generation_config")
    return value is False


def _check(defaults: Mapping[str, float | int], path: Path) -> None:
    """Check the ranges, as for the parameters of a request."""
    key_of = {name: key for key, (name, _) in _FIELDS.items()}
    for name, value in defaults.items():
        field: dict[str, Any] = {name: value}
        try:
            SamplingParams(**field)
        except RequestError as error:
            message = f"{path}: {key_of[name]}: {error.message}; correct the file, or use --generation-config none"
            raise ConfigError(message, param="generation_config") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."
