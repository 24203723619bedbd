"""Continuum: a time to live for the pages of an agent that waits for a tool (arXiv 2511.02230), by its abstract.

When a request of a program ends, its pages are pinned for the time that maximises the chance that the tool returns
within it, times the benefit, less the cost of the memory. The chance is the share of the latest gaps, and exponential
before there are ten. Pages of programs that came first are unpinned last. After the time, or under pressure, they are
as others, of which the least recently used go first.

The sources seen do not say how benefit and cost are measured. Here both are counted in tokens to compute again: the
benefit is a use of the pages, and the cost that of others in their place, which are used as often as pages were so far
in the mean time that they stayed. The paper's gaps are by tool, which an engine does not see: here they are by tenant.
Its order of programs is that of their arrival; the scheduler is the same for all retentions here.
"""

import math
from collections import defaultdict
from typing import ClassVar

from lab.retention.estimates import Average, Gaps
from orca_jax.policy import API, Keeping, KeptSpan

FEW = 10  # gaps, before which they are exponential
COLD = 10.0  # mean seconds of these


class Continuum:
    """Pins the pages of programs for the time that pays off."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"program", "tenant"})

    def __init__(self) -> None:
        self._gaps: defaultdict[str, Gaps] = defaultdict(Gaps)
        self._first: dict[str, int] = {}  # the order of programs
        self._stay = Average(60.0)  # seconds until pages are lost
        self._use = Average(0.5)  # share of spans that are used again

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """Pin what was just left for its time; no worth after it, and less when its program has ended."""
        if span.has_ended:
            self._first.pop(span.session, None)
            return Keeping(-1.0)
        seconds = self._time_to_live(span.tenant) if span.session else 0.0
        left = span.kept_at + seconds - now
        if left <= 0:
            return Keeping(0.0)
        order = self._first.setdefault(span.session, len(self._first))
        return Keeping(1.0 + 1.0 / (1.0 + order), left)

    def used(self, span: KeptSpan, now: float) -> None:
        """Count the gap."""
        self._gaps[span.tenant].add(now - span.kept_at)
        self._use.add(1.0)

    def lost(self, span: KeptSpan, now: float) -> None:
        """Count how long pages stay."""
        self._stay.add(now - span.kept_at)
        self._use.add(0.0)

    def _time_to_live(self, tenant: str) -> float:
        price = self._use.value / max(self._stay.value, 1e-3)  # of a second in the cache
        gaps = self._gaps[tenant]
        if len(gaps) < FEW:
            # where the density of the chance falls to the price
            return max(0.0, -COLD * math.log(min(1.0, price * COLD)))
        best = 0.0
        gain = 0.0
        for seconds in gaps.values:
            found = gaps.share_up_to(seconds) - price * seconds
            if found > gain:
                gain = found
                best = seconds
        return best
