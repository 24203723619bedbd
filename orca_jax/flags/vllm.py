"""vLLM's flags and keywords beside those of this package: other names, those without an effect here, and refused ones.

`vllm.toml` has all but the other names. `docs/vllm.md` lists them, and `tests/flags/` checks that all flags and
keywords of a version of vLLM are known.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
    "--block-size": "--page-size", "--device-memory-utilization": "--gpu-memory-utilization",
    "--disable-log-requests": "--no-log-requests",
    "--enable-log-requests": "--log-requests", "--no-enable-log-requests": "--no-log-requests",
    "--num-gpu-blocks-override": "--num-pages",
}  # fmt: skip
"""vLLM's names of flags that are here too."""

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


def _named(groups: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
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
        **{name: Known(mark, reason) for name, mark, reason in _named(tables["no_effect"])},
        **{name: Known("=", row["reason"], tuple(row["values"])) for name, row in tables["only"].items()},
    }


@cache
def refused_flags() -> Mapping[str, str]:
    """Return the reasons of the flags that are refused."""
    return {name: reason for name, _, reason in _named(_tables()["refused"])}


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("vllm.toml").read_text(encoding="utf-8"))


def translated(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a command line without the flags that have no effect here, and these flags.

    Underscores of flags become dashes, and vLLM's other names those of this package.

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
        flag, equals, value = dashed(word).partition("=")
        flag = SAME.get(flag, flag) if flag not in own else flag
        name = "optimization-level" if _LEVEL.fullmatch(flag) else flag.removeprefix("--").partition(".")[0]
        if flag in own or not flag.startswith("-") or (known := _known(name, not equals)) is None:
            kept.append(flag + equals + value)
            continue
        values = [value] if equals or _LEVEL.fullmatch(flag) else _values(known.mark, rest)
        try:
            check_value(known, values[0] if values else "")
        except ValueError as error:
            raise ValueError(f"argument {flag}: {error}") from None
        dropped.append(flag)
    return kept + rest, dropped


def dashed(word: str) -> str:
    """Return a word of a command line, with dashes in place of the underscores of a flag."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def own_setting(name: str, value: Any) -> tuple[str, Any]:
    """Return the name of this package for a setting of vLLM, with dashes, and its value."""
    name = name.replace("_", "-")
    same = SAME.get(f"--{name}", f"--{name}").removeprefix("--")
    return (same.removeprefix("no-"), not value) if same.startswith("no-") and same != name else (same, value)


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
    taken, refused = taken_flags(), refused_flags()
    if name in refused:
        raise ValueError(f"argument --{name}: {_REFUSED}: {refused[name]}")
    known = taken.get(name)
    if known is None and may_negate and name.startswith("no-"):
        positive = name.removeprefix("no-")
        known = taken.get(positive) or (Known("", refused[positive]) if positive in refused else None)
        return None if known is None else Known("", known.reason)
    return known


def check_value(known: Known, value: Any) -> None:
    """Check the value of a setting that may be taken. Raises ValueError."""
    if known.only is not None and str(value) not in known.only:
        raise ValueError(f"must be {' or '.join(known.only)}, got {value!r}: {known.reason}")


def _values(mark: str, rest: list[str]) -> list[str]:
    """Take the values of a flag from the words after it."""
    found: list[str] = []
    while rest and mark and not (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0])):
        found.append(rest.pop(0))
        if mark == "=":
            break
    return found
