"""Wishes of a caller about the pages of its request in the prefix cache; they are never commands."""

from dataclasses import dataclass
from math import isfinite

from orca_jax.values.errors import RequestError

MOST_WISHES = 16
MOST_SECONDS = 86_400.0  # 24 hours, the longest retention that any API offers
USUAL_PRIORITY = 50
HIGHEST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class CacheWish:
    """A wish for a part of a prompt.

    Raises:
        RequestError: a number is out of range; `param` is "cache_hints".
    """

    start: int = 0  # tokens before the part
    end: int | None = None  # tokens up to its end; None: up to the end of the answer
    ttl: float | None = None  # seconds for which it should be kept; None: none are named
    priority: int = USUAL_PRIORITY  # from 0, of no further use, to 100, given up last

    def __post_init__(self) -> None:
        _require(self.start >= 0, "start must be at least 0", self.start)
        _require(self.end is None or self.end > self.start, "end must be after start", self.end)
        fits = self.ttl is None or (isfinite(self.ttl) and 0 <= self.ttl <= MOST_SECONDS)
        _require(fits, f"ttl must be from 0 to {MOST_SECONDS:g} seconds", self.ttl)
        fits = 0 <= self.priority <= HIGHEST_PRIORITY
        _require(fits, f"priority must be from 0 to {HIGHEST_PRIORITY}", self.priority)


@dataclass(frozen=True, slots=True)
class CacheHints:
    """The wishes of a request, and its session.

    Raises:
        RequestError: there are more than `MOST_WISHES` wishes; `param` is "cache_hints".
    """

    session: str = ""  # of an agent or a conversation; empty: `Urgency.program`
    ends: bool = False  # the session ends with this request
    wishes: tuple[CacheWish, ...] = ()  # of several for one token the last one counts

    def __post_init__(self) -> None:
        number = len(self.wishes)
        _require(number <= MOST_WISHES, f"wishes must be at most {MOST_WISHES}", number)


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise RequestError(f"cache_hints: {what}, got {got!r}", param="cache_hints")
