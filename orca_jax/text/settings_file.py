"""The small JSON files of a model directory, read with limits: who wrote them is not known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_jax.errors import ConfigError

MAX_SETTINGS_BYTES = 16 * 2**20  # tokenizer_config.json repeats thousands of added tokens in some models


def read_settings(path: Path, param: str, limit: int = MAX_SETTINGS_BYTES) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is no such file.

    Raises:
        ConfigError: it cannot be read, has more than `limit` bytes or holds something else; names file and `param`.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, limit, param), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object", param=param)
    return value


def read_text(path: Path, limit: int, param: str) -> str:
    """The text of a file of at most `limit` bytes.

    Raises:
        ConfigError: it is no file, cannot be read or is larger; names it, with `param`.
    """
    if not path.is_file():  # before opening it: a pipe would block, and a device may never end
        raise ConfigError(f"{path} is no file", param=param)
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
    raise ValueError(f"{text} is no number of JSON")
