"""The retentions of settings, beside the least recently used pages first, which the pools have of themselves."""

from orca_jax.sched.prefixes.spans import Keeping, KeptSpan
from orca_jax.values.cache_hints import HIGHEST_PRIORITY

MANY = 8  # hits from which spans count as equally popular
AGES = 24  # of spans, each twice as long as the one before it: the first is one second
CONTEXT = 4096.0
"""Tokens before a page with which it takes about twice as long to compute as at the begin of a prompt."""


class LruTtl:
    """The least recently used span first, after those of no further use; spans in the time of a wish come last.

    Among these a higher priority is given up later.
    """

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """No worth; less for what has ended, and more up to the end of a wish."""
        if span.has_ended or span.priority == 0:
            return Keeping(-1.0)
        age = now - span.kept_at
        if span.ttl is None or age >= span.ttl:
            return Keeping(0.0)
        return Keeping(1.0 + span.priority / HIGHEST_PRIORITY, span.ttl - age)

    def used(self, span: KeptSpan, now: float) -> None:
        """Does nothing: the span gets a new time when it is left again."""

    def lost(self, span: KeptSpan, now: float) -> None:
        """Does nothing: an order by times needs no count of losses."""


class Cost:
    """The least expected loss for each page first: time to compute it again, times the rate at which it is used.

    The time is relative, and grows with the tokens before a page. The rate is that of earlier spans with as many hits
    and of this age: their uses, by the seconds that they were kept for. Before there are any it is one use in as many
    seconds as the span is old, and more with hits.
    """

    def __init__(self) -> None:
        begun = [float(2**age) for age in range(AGES)]
        self._uses = [[(hits + 1) / (hits + 2)] * AGES for hits in range(MANY + 1)]
        self._seconds = [list(begun) for _ in self._uses]

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The expected loss in each second, up to the end of this age; nothing for what has ended."""
        if span.has_ended or span.priority == 0:
            return Keeping(-1.0)
        age, begun = _age_of(span, now)
        hits = min(span.hits, MANY)
        if age:
            self._seconds[hits][age - 1] += 2 ** (age - 1)
        rate = self._uses[hits][age] / self._seconds[hits][age]
        return Keeping(rate * (1.0 + span.start / CONTEXT), max(2**age - begun, 1e-3))

    def used(self, span: KeptSpan, now: float) -> None:
        """Count a use."""
        age, _ = _age_of(span, now)
        self._uses[min(span.hits, MANY)][age] += 1
        self.lost(span, now)

    def lost(self, span: KeptSpan, now: float) -> None:
        """Count the seconds of the last age."""
        age, begun = _age_of(span, now)
        self._seconds[min(span.hits, MANY)][age] += begun


def _age_of(span: KeptSpan, now: float) -> tuple[int, float]:
    """The number of a span's age, and the seconds since its begin."""
    seconds = max(0.0, now - span.kept_at)
    age = min(int(seconds + 1).bit_length() - 1, AGES - 1)
    return age, min(seconds + 1 - 2**age, 2.0**age)
