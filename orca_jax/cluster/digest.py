"""Digests of all calls and results. The leader compares its own digests with those of its workers."""

import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from orca_jax.values.step import StepResult


class Digests(NamedTuple):
    """The digests after an iteration: of all calls, and of all results so far."""

    calls: int
    # None in a process without the last stage of a pipeline, which has no results
    results: int | None

    def agree(self, other: "Digests") -> bool:
        """True if nothing differs in the parts of both."""
        has_both = self.results is not None and other.results is not None
        return self.calls == other.calls and (not has_both or self.results == other.results)


class Digester:
    """Makes chained digests: they differ once any call or result has differed.

    The calls and the results of an iteration enter together, when its result is read: at that time all its calls are
    known, although later iterations may have begun.
    """

    def __init__(self) -> None:
        self._calls = self._results = 0

    def add_iteration(self, payloads: Sequence[bytes], result: StepResult) -> Digests:
        """Take the messages of an iteration and its result; return the digests up to it."""
        for payload in payloads:
            self._calls = zlib.crc32(payload, self._calls)
        if not result.members:
            return Digests(self._calls, None)
        ids = array("q")
        for run, is_finite, *_ in result.members:
            ids.append(-1 - len(run))
            if run and is_finite:  # the id of logits that are not finite is undefined
                ids.extend(run)
        self._results = zlib.crc32(ids.tobytes(), self._results)
        return Digests(self._calls, self._results)
