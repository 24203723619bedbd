"""SAECache: two queues of pages with a priority of reuse each (arXiv 2605.18825), by its abstract.

Pages of conversations and pages of templates are in queues of their own. The priority of a page is the chance of its
use soon, by log-normal times between uses, times a decay with its position, times a weight of its kind of tokens. The
weights follow what is lost and used.

The product, the window of "soon" and all numbers are ours. An engine does not see kinds of tokens: pages that requests
of several sessions began with are those of templates, and of these the first ones of a prompt weigh most.
"""

import math
from typing import ClassVar

from lab.retention.estimates import LogNormal
from orca_jax.policy import API, Keeping, KeptSpan

SOON = 30.0  # seconds
DECAY = 2048.0  # tokens, over which a priority falls to 1/e
STEP = 0.02  # of a weight, for each span that is used or lost
LARGEST = 8.0  # and its inverse are the bounds of weights


class SaeCache:
    """The lowest priority of both queues first."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"program", "tenant"})

    def __init__(self) -> None:
        self._times = {False: LogNormal(10.0), True: LogNormal(10.0)}  # by whether it is a template
        self._weights = {False: 1.0, True: 2.0}

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The priority, until the span is twice as old."""
        if span.has_ended and not span.is_shared:
            return Keeping(-1.0)
        age = now - span.kept_at
        chance = self._times[span.is_shared].chance_within(SOON, age)
        decay = math.exp(-span.start / DECAY)
        return Keeping(chance * decay * self._weights[span.is_shared], max(1.0, age))

    def used(self, span: KeptSpan, now: float) -> None:
        """Count the time, and raise the weight of the queue."""
        self._times[span.is_shared].add(now - span.kept_at)
        self._weigh(span, 1 + STEP)

    def lost(self, span: KeptSpan, now: float) -> None:
        """Lower the weight of the queue."""
        self._weigh(span, 1 - STEP)

    def _weigh(self, span: KeptSpan, factor: float) -> None:
        weight = self._weights[span.is_shared] * factor
        self._weights[span.is_shared] = min(LARGEST, max(1 / LARGEST, weight))
