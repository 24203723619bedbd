"""The digest of everything that was run, by which the leader compares its workers with itself."""

import zlib
from array import array
from collections.abc import Sequence

from orca_jax.step import StepResult


class Digest:
    """A chained digest of the calls of an executor and their results: unequal once any of them has differed.

    The calls and the results of an iteration enter together, when its result is read: at that time all its calls are
    known, although later iterations may have begun.
    """

    def __init__(self) -> None:
        self._value = 0

    def add(self, payloads: Sequence[bytes], result: StepResult) -> int:
        """Take the messages of an iteration and its result; return the digest up to it."""
        value = self._value
        for payload in payloads:
            value = zlib.crc32(payload, value)
        ids = array("q", [result.num_steps])
        for run, is_finite, *_ in result.members:
            ids.append(-1 if run is None else -2 - len(run))
            if run and is_finite:  # the id of logits that are not finite is undefined
                ids.extend(run)
        self._value = zlib.crc32(ids.tobytes(), value)
        return self._value
