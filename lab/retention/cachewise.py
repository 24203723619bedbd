"""CacheWise: the farthest predicted use goes first, by metadata of tools (arXiv 2606.16824), by its abstract.

The next use of pages is predicted by the tool that the agent waits for. An engine sees no tools: here the prediction is
the mean gap of the tenant, or of shared beginnings, which many requests use. What is overdue is expected after as much
time again, up to a few mean gaps, and then not at all.

The paper also orders requests by the prefixes that they share; the scheduler is the same for all retentions here.
"""

from collections import defaultdict
from typing import ClassVar

from lab.retention.estimates import Average
from orca_jax.policy import API, Keeping, KeptSpan

COLD = 20.0  # mean seconds, before the first gap
LATE = 4.0  # mean gaps after which a use is not expected any more


class CacheWise:
    """The farthest predicted use first."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"program", "tenant"})

    def __init__(self) -> None:
        self._gap: defaultdict[str, Average] = defaultdict(lambda: Average(COLD))
        self._of_shared = Average(COLD)

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The predicted time of the use, negated, until it is over."""
        if span.has_ended and not span.is_shared:
            return Keeping(float("-inf"))
        gap = max(1e-3, self._mean(span).value)
        age = now - span.kept_at
        if age > LATE * gap:
            return Keeping(-1e9 + span.kept_at)
        expected = span.kept_at + gap
        if age >= gap:
            expected = now + age
        return Keeping(-expected, max(1e-3, expected - now))

    def used(self, span: KeptSpan, now: float) -> None:
        """Count the gap."""
        self._mean(span).add(now - span.kept_at)

    def lost(self, span: KeptSpan, now: float) -> None:
        """Does nothing: the gap is not known."""

    def _mean(self, span: KeptSpan) -> Average:
        return self._of_shared if span.is_shared else self._gap[span.tenant]
