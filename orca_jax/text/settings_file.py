"""Reads the small JSON files of a model directory, with limits, since their authors are not trusted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_jax.values.checks import json_value
from orca_jax.values.errors import ConfigError

# tokenizer_config.json repeats thousands of added tokens in some models
MAX_SETTINGS_BYTES = 16 * 2**20


def read_settings(path: Path, param: str, limit: int = MAX_SETTINGS_BYTES) -> Mapping[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file.

    Raises:
        ConfigError: the file cannot be read, has more than `limit` bytes, or does not hold an object. The message
            names the file.
    """
    if not path.exists():
        return {}
    text = read_text(path, limit, param)
    try:
        value = json_value(text, parse_constant=_no_number)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object", param=param)
    return value


def read_text(path: Path, limit: int, param: str) -> str:
    """Return the text of a file of at most `limit` bytes.

    Raises:
        ConfigError: it is not a file, cannot be read, or is larger. The message names the file.
    """
    if not path.is_file():  # checked before opening: a pipe would block, and a device may never end
        raise ConfigError(f"{path} is not a file; check the path", param=param)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param=param) from None
    if len(content) > limit:
        raise ConfigError(f"{path} has more than {limit} bytes", param=param)
    return text


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
