"""Reads the chat template and the texts of the special tokens from a model directory."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from orca_jax.helpers.bundled import is_gguf, is_preset
from orca_jax.text.gguf_texts import templates_of_gguf
from orca_jax.text.settings_file import read_settings, read_text
from orca_jax.values.errors import ConfigError

MAX_TEMPLATE_BYTES = 2**20
PARAM = "chat_template"  # the flag named by errors

_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_templates(source: str, override: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the templates by name, and the special tokens by name.

    If there are templates, one of them is named "default".

    Args:
        source: a model directory, a tokenizer.json in it, or a GGUF file; empty or "preset:<name>" for the plain
            template.
        override: a file with a template that replaces those of the directory.

    Raises:
        ConfigError: a file cannot be read, is too large, or has the wrong content; the message names it.
    """
    if is_gguf(source):
        found = templates_of_gguf(Path(source))
        if override is None:
            return found
        return (_of_file(override), found[1])
    directory = _directory(source)
    settings: Mapping[str, Any] = {}
    tokens: dict[str, str] = {}
    if directory is not None:
        settings = read_settings(directory / "tokenizer_config.json", PARAM)
        tokens = {
            **_tokens(read_settings(directory / "special_tokens_map.json", PARAM)),
            **_tokens(settings),
        }
    if override is not None:
        return _of_file(override), tokens
    if directory is None:
        plain = (
            resources.files("orca_jax.text")
            .joinpath("plain_chat.jinja")
            .read_text(encoding="utf-8")
        )
        return {"default": plain}, tokens
    own = directory / "chat_template.jinja"
    if own.exists():
        return _of_file(own), tokens
    return _named(settings.get("chat_template"), directory / "tokenizer_config.json"), tokens


def _of_file(path: str | Path) -> dict[str, str]:
    return {"default": read_text(Path(path), MAX_TEMPLATE_BYTES, PARAM)}


def _directory(source: str) -> Path | None:
    """Return the model directory, or None for a preset."""
    if not source or is_preset(source):
        return None
    path = Path(source)
    if path.is_file():
        return path.parent
    return path


def _named(value: object, path: Path) -> dict[str, str]:
    """Return the templates by name of a string, a list of named templates, or nothing."""
    if value is None:
        return {}
    found: dict[str, str] = {}
    if isinstance(value, str):
        value = [{"name": "default", "template": value}]
    entries = value if isinstance(value, list) else [None]
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
            raise _wrong(
                path, "chat_template must be a string or a list of objects with name and template"
            )
        found[str(entry.get("name"))] = entry["template"]
    if found and "default" not in found:
        raise _wrong(
            path, f"chat_template has no template named default, only {', '.join(sorted(found))}"
        )
    if sum(map(len, found.values())) > MAX_TEMPLATE_BYTES:
        raise _wrong(path, f"chat_template is longer than {MAX_TEMPLATE_BYTES} characters")
    return found


def _tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens. A token may be an object with the text as its content."""
    found = {}
    for name in _TOKENS:
        text = settings.get(name)
        if isinstance(text, dict):
            text = text.get("content")
        if isinstance(text, str):
            found[name] = text
    return found


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}", param=PARAM)
