"""Flags and commands of llama.cpp and ollama: with a meaning here, without an effect, or refused.

`habits.toml` lists all flags and commands. A flag of the program itself stays as it is.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orca_jax.flags.vllm import named, values_after


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of `habits.toml`."""
    return tomllib.loads(Path(__file__).with_name("habits.toml").read_text(encoding="utf-8"))


@cache
def _without_effect() -> Mapping[str, str]:
    """The marks of the flags without an effect: the number of their values."""
    return {name: mark for name, mark, _ in named(tables()["no_effect"])}


@cache
def _refused() -> Mapping[str, str]:
    return {name: reason for name, _, reason in named(tables()["refused"])}


def command_hint(word: str) -> str | None:
    """Return what to run in the place of a command of another program; None for an unknown one."""
    hint: str | None = tables()["commands"].get(word)
    return hint


def is_habit(flag: str) -> bool:
    """True for a flag of llama.cpp."""
    return flag in tables()["same"] or flag in _without_effect() or flag in _refused()


def in_own_words(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a command line with the flags of this package, and the flags that have no effect here.

    Args:
        words: the command line.
        own: the flags of the parser; they are kept, and so is everything after `--`.

    Raises:
        ValueError: a flag is refused; the message names it.
    """
    kept: list[str] = []
    dropped: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in own or not is_habit(flag):
            kept.append(word)
            continue
        if flag in _refused():
            raise ValueError(
                f"argument {flag}: llama.cpp's setting is not supported: {_refused()[flag]}"
            )
        if flag in _without_effect():
            if not equals:
                values_after(_without_effect()[flag], rest)
            dropped.append(flag)
            continue
        row = tables()["same"][flag]
        same = _first(row["same"], own)
        if same is None:
            kept.append(word)
            continue
        values = [value] if equals else values_after("=", rest)
        if values and values[0] in row.get("none", ()):
            dropped.append(flag)
            continue
        kept += [same, *values]
    return kept + rest, dropped


def _first(flags: Sequence[str], own: Collection[str]) -> str | None:
    """The first flag that the program has; a part of a setting counts as the setting."""
    for flag in flags:
        if flag.partition(".")[0] in own:
            return flag
    return None
