"""Settings by name instead of by flag: the file of `--config`, and mappings in its form."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from orca_jax.flags.texts import JSON_FLAGS
from orca_jax.flags.vllm import has_no_effect, named_value, own_setting
from orca_jax.values.checks import MAX_NESTING, did_you_mean, short
from orca_jax.values.errors import ConfigError

MAX_BYTES = 2**20  # of a file

_OUTSIDE = ("config", "help")  # flags about the command line itself


def file_of(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of `flag` in a command line, or None."""
    words = words[: words.index("--")] if "--" in words else words
    found = None
    for word, following in zip_longest(words, words[1:]):
        if word == flag and following is not None:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def read_settings(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """Read a YAML file of settings. Returns values for a namespace, by the names of the settings.

    Raises:
        ConfigError: the file cannot be read, or as `values_of`; `param` is "config".
    """
    import yaml  # programs without a file start sooner

    try:
        with Path(path).open("rb") as file:  # a pipe may be given
            text = file.read(MAX_BYTES + 1).decode("utf-8")
        if len(text) > MAX_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_BYTES} bytes; give a YAML file of flags", param="config"
            )
        _check_nesting(path, yaml.parse(text, yaml.SafeLoader))
        data = yaml.safe_load(text)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}; give a YAML file of flags"
        raise ConfigError(message, param="config") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid YAML: {error}", param="config") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{path} is not valid YAML: {place}{problem}", param="config") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold flags and their values, such as 'port: 8000'", param="config"
        )
    return values_of(parser, data, path)


def _check_nesting(path: str, events: Iterator[Any]) -> None:
    """Refuse lists in lists in lists, and aliases: a few lines of them stand for billions of values.

    Raises:
        ConfigError: the message names the line.
    """
    depth = 0
    for event in events:
        name = type(event).__name__
        line = event.start_mark.line + 1
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        if name == "AliasEvent":
            message = f"{path}: line {line}: *{event.anchor} stands for a value of another line; write the value again"
            raise ConfigError(message, param="config")
        if depth > MAX_NESTING:
            raise ConfigError(
                f"{path}: line {line}: it is nested deeper than {MAX_NESTING} levels",
                param="config",
            )


def values_of(
    parser: argparse.ArgumentParser, data: Mapping[str, object], origin: str
) -> dict[str, Any]:
    """Return values for a namespace, by the names of the settings. None stands for the default.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is wrong; the message begins with `origin`.
    """
    known = dict(_known(parser))
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in data.items():
        name, value = own_setting(str(key), value)
        action = known.get(name)
        if action is None and _is_ignored(parser, name, value, f"{origin}: {key}"):
            continue
        if action is None:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{origin}: there is no setting {key!r}{hint}", param="config")
        if (remark := _named_value(parser, name, value)) is not None:
            parser.name_ignored([f"--{name} ({remark})"])  # type: ignore[attr-defined]
            continue
        if action.dest in seen:
            raise ConfigError(f"{origin} sets {key} twice", param="config")
        seen.add(action.dest)
        try:
            if value is not None:
                found[action.dest] = _value(parser, action, value)
        except (argparse.ArgumentError, ValueError) as error:
            problem = error.message if isinstance(error, argparse.ArgumentError) else error
            raise ConfigError(f"{origin}: {key}: {problem}", param="config") from None
    return found


def _is_ignored(parser: argparse.ArgumentParser, name: str, value: object, place: str) -> bool:
    """Name a setting of vLLM that has no effect here. Returns False for another one, and raises for a refused one."""
    try:
        found = getattr(parser, "takes_vllm", False) and has_no_effect(name, value)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}", param="config") from None
    if found:
        parser.name_ignored([f"--{name}"])  # type: ignore[attr-defined]
    return found


def _named_value(parser: argparse.ArgumentParser, name: str, value: object) -> str | None:
    """The value of a setting of this package that is taken and named; None for one with an effect."""
    return named_value(name, value) if getattr(parser, "takes_vllm", False) else None


def _known(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The flags by their names without dashes in front. A negation is a value of its flag."""
    for action in parser._actions:
        for flag in action.option_strings:
            is_negation = isinstance(action, argparse.BooleanOptionalAction) and flag.startswith(
                "--no-"
            )
            if flag.startswith("--") and not is_negation and action.dest not in _OUTSIDE:
                yield flag.removeprefix("--"), action


def _value(parser: argparse.ArgumentParser, action: argparse.Action, value: object) -> Any:
    """Convert a value of YAML as the flag converts its words. Raises ArgumentError or ValueError."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {short(value)}")
        return value
    if isinstance(value, dict) and action.dest in JSON_FLAGS:
        value = json.dumps(value)
    items = value if isinstance(value, list) else [value]
    if not items or not all(_is_plain(item) for item in items):
        raise ValueError(f"must be a plain value or a list of plain values, got {short(value)}")
    if len(items) > 1 and action.nargs is None:
        raise ValueError(f"must be one value, got {short(value)}")
    return parser._get_values(action, [str(item) for item in items])


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
