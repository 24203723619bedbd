"""vLLM's flags and keywords beside those of this package: other names, those without an effect here, and refused ones.

`vllm.toml` has all but the other names. `docs/vllm.md` lists them, and `tests/flags/` checks that all flags and
keywords of a version of vLLM are known.
"""

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.flags.program import flag_of
from orca_jax.flags.texts import ALIASES, JSON_FLAGS
from orca_jax.values.checks import json_value

SAME: Mapping[str, str] = {
    "-ac": "--attention-config", "-asc": "--api-server-count", "-cc": "--compilation-config",
    "-dc": "--diffusion-config", "-dcp": "--decode-context-parallel-size", "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address", "-dpb": "--data-parallel-backend", "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb", "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb", "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port", "-dpr": "--data-parallel-start-rank", "-ep": "--enable-expert-parallel",
    "-n": "--nnodes", "-pcp": "--prefill-context-parallel-size", "-q": "--quantization", "-r": "--node-rank",
    "-O": "--optimization-level", "-sc": "--speculative-config",
    "--async-scheduling": "--overlap", "--no-async-scheduling": "--no-overlap",
    **{alias: flag_of(name) for name, aliases in ALIASES.items() for alias in aliases},
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--disable-log-requests": "--no-log-requests",
    "--enable-log-requests": "--log-requests", "--no-enable-log-requests": "--no-log-requests",
    "--num-gpu-blocks-override": "--num-pages",
}  # fmt: skip
"""vLLM's names of flags that are here too."""

_PARTED = frozenset(name.replace("_", "-") for name in JSON_FLAGS)
_LEVEL = re.compile(r"-O[0-3]")
_REFUSED = "vLLM's setting is not supported"
_NUMBER = re.compile(r"-\d+(\.\d+)?")


class Known(NamedTuple):
    """A flag of vLLM that has no effect here.

    `mark` is its number of values: "" for none, "=" for one, "*" for several. `only` lists the values that are taken.
    """

    mark: str
    reason: str
    only: tuple[str, ...] | None = None


def named(groups: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Each name with the mark after it and the reason of its group."""
    for reason, names in groups.items():
        for word in names.split():
            name = word.rstrip("=*")
            yield name, word[len(name) :], reason


@cache
def taken_flags() -> Mapping[str, Known]:
    """Return the flags that have no effect here."""
    tables = _tables()
    return {
        **{name: Known(mark, reason) for name, mark, reason in named(tables["no_effect"])},
        **{
            name: Known("=", row["reason"], tuple(row["values"]))
            for name, row in tables["only"].items()
        },
    }


@cache
def refused_flags() -> Mapping[str, str]:
    """Return the reasons of the flags that are refused."""
    return {name: reason for name, _, reason in named(_tables()["refused"])}


def own_values() -> Mapping[str, Mapping[str, Any]]:
    """Return the values of settings of this package that are taken and named, with their reasons."""
    return _tables()["own_values"]


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("vllm.toml").read_text(encoding="utf-8"))


def translated(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a command line without the flags that have no effect here, and these flags.

    Underscores of flags become dashes, and vLLM's other names become names of this package. Parts of a setting, such as
    `--speculative-config.method ngram`, become one flag with JSON.

    Args:
        words: the command line.
        own: the flags of the parser; they are kept, and so is everything after `--`.

    Raises:
        ValueError: a flag is refused; the message names it.
    """
    kept: list[str] = []
    dropped: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = dashed(word).partition("=")
        flag = SAME.get(flag, flag) if flag not in own else flag
        base, dot, key = flag.partition(".")
        base = SAME.get(base, base) if base not in own else base
        if dot and base in own and base.removeprefix("--") in _PARTED:
            values = [value] if equals else values_after("=", rest)
            _add_part(parts.setdefault(base, {}), key, values)
            continue
        name = "optimization-level" if _LEVEL.fullmatch(flag) else base.removeprefix("--")
        if flag in own:
            _keep(flag, [value] if equals else [], rest, kept, dropped)
            continue
        if not flag.startswith("-") or (known := _known(name, not equals)) is None:
            kept.append(flag + equals + value)
            continue
        values = [value] if equals or _LEVEL.fullmatch(flag) else values_after(known.mark, rest)
        try:
            check_value(known, values[0] if values else "")
        except ValueError as error:
            raise ValueError(f"argument {flag}: {error}") from None
        dropped.append(flag)
    for flag, values_of_parts in parts.items():
        _keep(flag, [json.dumps(values_of_parts)], [], kept, dropped)
    return kept + rest, dropped


def _keep(
    flag: str, values: list[str], rest: list[str], kept: list[str], dropped: list[str]
) -> None:
    """Keep a flag of this package, unless it has a value that is taken and named.

    Args:
        flag: the flag.
        values: its value, if that is in the same word.
        rest: the words after it.
        kept: the words that are kept so far.
        dropped: the flags that have no effect so far.
    """
    found = values or rest[:1]
    remark = named_value(flag.removeprefix("--"), found[0]) if found else None
    if remark is None:
        kept.append(f"{flag}={values[0]}" if values else flag)
        return
    if not values:
        rest.pop(0)
    dropped.append(f"{flag} ({remark})")


def named_value(name: str, value: object) -> str | None:
    """Return the value of a setting of this package that is taken and named; None for a value with an effect.

    Args:
        name: the setting, with dashes.
        value: its value; that of `speculative-config` is an object, or JSON.
    """
    row = own_values().get(name)
    if row is None:
        return None
    asked = _method_of(value) if name == "speculative-config" else str(value)
    return asked if asked in row["values"] else None


def _method_of(value: object) -> str | None:
    """The method of speculation; None if the value is not an object with one."""
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError:
            return None
    method = value.get("method") if isinstance(value, Mapping) else None
    return method if isinstance(method, str) else None


def _add_part(parts: dict[str, Any], key: str, values: Sequence[str]) -> None:
    """Add a part of a setting, such as `pass_config.level`, to its object. Raises ValueError."""
    if not values:
        raise ValueError(f"argument {key}: expected one argument")
    *outer, last = [name.replace("-", "_") for name in key.split(".")]
    for name in outer:
        inner = parts.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"argument {key}: {name} has a value already; give one of them")
        parts = inner
    try:
        parts[last] = json_value(values[0])
    except ValueError:
        parts[last] = values[0]


def dashed(word: str) -> str:
    """Return a word of a command line, with dashes in place of the underscores of a flag."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def own_setting(name: str, value: Any) -> tuple[str, Any]:
    """Return the name of this package for a setting of vLLM, with dashes, and its value."""
    name = name.replace("_", "-")
    same = SAME.get(f"--{name}", f"--{name}").removeprefix("--")
    return (
        (same.removeprefix("no-"), not value)
        if same.startswith("no-") and same != name
        else (same, value)
    )


def has_no_effect(name: str, value: Any) -> bool:
    """True for a setting of vLLM that is taken, by its name with dashes; False if vLLM does not have it.

    Raises:
        ValueError: it is refused. A refused one may be None or False.
    """
    if value is None or value is False:
        return name in taken_flags() or name in refused_flags()
    if name in refused_flags():
        raise ValueError(f"{_REFUSED}: {refused_flags()[name]}")
    if known := taken_flags().get(name):
        check_value(known, value)
    return known is not None


def _known(name: str, may_negate: bool) -> Known | None:
    """The row of a flag without effect; None for one that vLLM does not have. Raises ValueError for refused ones."""
    taken = taken_flags()
    refused = refused_flags()
    if name in refused:
        raise ValueError(f"argument --{name}: {_REFUSED}: {refused[name]}")
    known = taken.get(name)
    if known is None and may_negate and name.startswith("no-"):
        positive = name.removeprefix("no-")
        known = taken.get(positive) or (
            Known("", refused[positive]) if positive in refused else None
        )
        return None if known is None else Known("", known.reason)
    return known


def check_value(known: Known, value: Any) -> None:
    """Check the value of a setting that may be taken. Raises ValueError."""
    if known.only is not None and str(value) not in known.only:
        raise ValueError(f"must be {' or '.join(known.only)}, got {value!r}: {known.reason}")


def values_after(mark: str, rest: list[str]) -> list[str]:
    """Take the values of a flag from the words after it."""
    found: list[str] = []
    while rest and mark and not (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0])):
        found.append(rest.pop(0))
        if mark == "=":
            break
    return found
