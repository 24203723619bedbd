"""The cases of a test run, where all of them form a product; those beyond the default run are slow."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """The parameters of a case that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def covering(
    cases: Iterable[Any],
    aspects: Callable[[Any], Sequence[Hashable]] = lambda case: case,
    size: int = 2,
) -> list[Any]:
    """Parameters of a test: a case is slow if the others show each combination of `size` of its aspects.

    Args:
        cases: parameters of each case; a tuple has several.
        aspects: returns what matters of a case, always in the same order.
        size: number of aspects in a combination; 2 for all pairs, 1 for all values.
    """
    cases = list(cases)
    quick = positions(cases, aspects, size)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if index in quick else pytest.mark.slow,
        )
        for index, case in enumerate(cases)
    ]


def chosen(
    cases: Iterable[Any],
    aspects: Callable[[Any], Sequence[Hashable]] = lambda case: case,
    size: int = 2,
) -> list[Any]:
    """The cases that are not slow in `covering`, for a slow test whose others cost more than they show."""
    cases = list(cases)
    return [cases[index] for index in sorted(positions(cases, aspects, size))]


def positions(
    cases: Sequence[Any], aspects: Callable[[Any], Sequence[Hashable]], size: int
) -> set[int]:
    """Positions of cases that have each combination of `size` aspects: the case with the most new ones comes next."""
    shown = [set(combinations(enumerate(aspects(case)), size)) for case in cases]
    missing = set().union(*shown)
    found = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(shown[index] & missing))
        found.add(best)
        missing -= shown[best]
    return found
