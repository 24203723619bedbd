"""vLLM's flags and keywords beside those of this package: other names, those without an effect here, and refused ones.

`docs/vllm.md` lists them, and `tests/flags/` checks that all flags and keywords of a version of vLLM are known.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orca_jax.flags.vllm_names import NO_EFFECT, ONLY, REFUSED, SAME

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


TAKEN: Mapping[str, Known] = {
    **{name: Known(mark, reason) for name, mark, reason in _named(NO_EFFECT)},
    **{name: Known("=", reason, values) for name, (values, reason) in ONLY.items()},
}
REASONS: Mapping[str, str] = {name: reason for name, _, reason in _named(REFUSED)}


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
        return name in TAKEN or name in REASONS
    if name in REASONS:
        raise ValueError(f"{_REFUSED}: {REASONS[name]}")
    if known := TAKEN.get(name):
        check_value(known, value)
    return known is not None


def _known(name: str, may_negate: bool) -> Known | None:
    """The row of a flag without effect; None for one that vLLM does not have. Raises ValueError for refused ones."""
    if name in REASONS:
        raise ValueError(f"argument --{name}: {_REFUSED}: {REASONS[name]}")
    known = TAKEN.get(name)
    if known is None and may_negate and name.startswith("no-"):
        positive = name.removeprefix("no-")
        known = TAKEN.get(positive) or (Known("", REASONS[positive]) if positive in REASONS else None)
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
