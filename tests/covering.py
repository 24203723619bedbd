"""The cases of the default test run, where all of them form a product; the others are slow."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(
    cases: Iterable[Any],
    aspects: Callable[[Any], Sequence[Hashable]] = lambda case: case,
    size: int = 2,
) -> list[Any]:
    """Parameters of a test: a case is slow if the others show each combination of `size` of its aspects.

    The default run has the case with the most new combinations again and again, until none is missing.

    Args:
        cases: parameters of each case; a tuple has several.
        aspects: returns what matters of a case, always in the same order.
        size: number of aspects in a combination; 2 for all pairs, 1 for all values.
    """
    cases = list(cases)
    shown = [set(combinations(enumerate(aspects(case)), size)) for case in cases]
    missing, chosen = set().union(*shown), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(shown[index] & missing))
        chosen.add(best)
        missing -= shown[best]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if index in chosen else pytest.mark.slow,
        )
        for index, case in enumerate(cases)
    ]
