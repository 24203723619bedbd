"""Properties with part of their examples in the default test run, and all of them in slow tests."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

PART = 4


def holds_for(
    count: int, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a property, below which its parameters stand. A slow twin with all examples joins its module.

    Args:
        count: number of all examples; the default run has a fourth of them.
        strategies: strategies of the arguments, as for `given`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        few, many = (
            settings(max_examples=number, deadline=None)(given(**strategies)(test))
            for number in (count // PART, count)
        )
        setattr(
            sys.modules[test.__module__],
            f"{test.__name__}_in_many_examples",
            pytest.mark.slow(many),
        )
        return few

    return decorate
