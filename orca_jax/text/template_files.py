"""Where a model directory keeps its chat template and the texts of its special tokens."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from orca_jax.errors import ConfigError

MAX_TEMPLATE_BYTES = 2**20
MAX_SETTINGS_BYTES = 16 * 2**20  # tokenizer_config.json repeats thousands of added tokens in some models

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_templates(source: str, override: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Templates by name, of which "default" is always there unless there are none, and special tokens by name.

    Args:
        source: a model directory, or a tokenizer.json in it; empty or "preset:<name>" for the plain template.
        override: a file with the template to take instead.

    Raises:
        ConfigError: a file is unreadable, too large or of the wrong shape; names it.
    """
    path = Path(source)
    directory = path.parent if path.is_file() else path
    is_preset = not source or source.startswith("preset:") or not directory.is_dir()
    settings = {} if is_preset else _settings(directory / "tokenizer_config.json")
    tokens = {} if is_preset else {**_tokens(_settings(directory / "special_tokens_map.json")), **_tokens(settings)}
    if override is not None:
        return {"default": _read(Path(override), MAX_TEMPLATE_BYTES)}, tokens
    if is_preset:
        plain = resources.files("orca_jax.text").joinpath("plain_chat.jinja").read_text(encoding="utf-8")
        return {"default": plain}, tokens
    own = directory / "chat_template.jinja"
    if own.exists():
        return {"default": _read(own, MAX_TEMPLATE_BYTES)}, tokens
    return _named(settings.get("chat_template"), directory / "tokenizer_config.json"), tokens


def _named(value: object, path: Path) -> dict[str, str]:
    """One template, a list of named ones, or none."""
    if value is None:
        return {}
    found: dict[str, str] = {}
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    for entry in entries if isinstance(entries, list) else [None]:
        if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
            raise _wrong(path, "chat_template must be a string or a list of objects with name and template")
        found[str(entry.get("name"))] = entry["template"]
    if found and "default" not in found:
        raise _wrong(path, f"chat_template has no template named default, only {', '.join(sorted(found))}")
    if sum(map(len, found.values())) > MAX_TEMPLATE_BYTES:
        raise _wrong(path, f"chat_template is longer than {MAX_TEMPLATE_BYTES} characters")
    return found


def _tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; a token may be an object with its text as content."""
    found = {}
    for name in _TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _settings(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path, MAX_SETTINGS_BYTES))
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise _wrong(path, "must hold an object")
    return value


def _read(path: Path, limit: int) -> str:
    try:
        if not path.is_file():  # before opening: a pipe or a device would block or never end
            raise _wrong(path, "is no file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise _wrong(path, f"has more than {limit} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}") from None


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}", param="chat_template")
