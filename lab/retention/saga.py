"""SAGA: a workflow-aware order of old pages, and a time for tools (arXiv 2605.00528), by its abstract.

The graph of an agent's execution predicts whether its pages are used again: here a chain of steps, in which the chance
of a next step is that of earlier programs of its tenant after as many steps. Pages within the time of a tool, the
95th percentile of the gaps, are ranked by this chance, those of an expected step first; later ones by their age alone.

The weights of the paper's order were not available: here the chance alone counts within the time. Its affinity of
sessions to servers, and the stealing between them, need several servers.
"""

from collections import defaultdict
from typing import ClassVar

from lab.retention.estimates import Gaps
from orca_jax.policy import API, Keeping, KeptSpan

SHARE = 0.95  # of the gaps, within the time of a tool
COLD = 30.0  # seconds of this time, before there are ten gaps
FEW = 10


class Saga:
    """Within the time of a tool the smallest chance of a next step first, after all later pages."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"program", "tenant"})

    def __init__(self) -> None:
        self._gaps: defaultdict[str, Gaps] = defaultdict(Gaps)
        self._steps: dict[str, int] = {}  # of each program
        # by tenant and number of steps: programs that came so far, and those that went on
        self._came: defaultdict[tuple[str, int], int] = defaultdict(lambda: 2)
        self._went_on: defaultdict[tuple[str, int], int] = defaultdict(lambda: 1)

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The chance of a next step within the time of a tool; then none."""
        if span.has_ended:
            self._steps.pop(span.session, None)
            return Keeping(0.0 if span.is_shared else -1.0)
        step = span.tenant, self._steps.setdefault(span.session, 1)
        left = span.kept_at + self._time_of(span.tenant) - now
        if left <= 0 or not span.session:
            return Keeping(0.0)
        if now == span.kept_at:
            self._came[step] += 1
        return Keeping(1.0 + self._went_on[step] / self._came[step], left)

    def used(self, span: KeptSpan, now: float) -> None:
        """Count the gap, and a step of the program at its latest pages."""
        self._gaps[span.tenant].add(now - span.kept_at)
        if span.hits == 0 and span.session in self._steps:
            steps = self._steps[span.session]
            self._went_on[span.tenant, steps] += 1
            self._steps[span.session] = steps + 1

    def lost(self, span: KeptSpan, now: float) -> None:
        """Does nothing: a program may go on."""

    def _time_of(self, tenant: str) -> float:
        gaps = self._gaps[tenant]
        return COLD if len(gaps) < FEW else gaps.quantile(SHARE)
