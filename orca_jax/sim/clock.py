"""A model that tells the time: for measuring what lies between a model and its reader.

`preset:clock-25` is the toy with iterations of 25 milliseconds. Whatever the prompt, its text is groups of a space and
seven digits, " 0123456", a character a token. The digits say when the group's space was ready, in ticks of
the machine's monotonic clock, so whoever reads the stream on the same machine sees how old it is. A stream may begin
within a group, whose missing part is dots.
"""

import time
from collections.abc import Callable

from orca_jax.errors import ConfigError

CLOCK_PREFIX = "preset:clock-"
TICKS_PER_SECOND = 10_000
NUM_DIGITS = 7
WRAP_SECONDS = 10**NUM_DIGITS / TICKS_PER_SECOND  # after which the digits repeat

_MAX_OPEN = 1 << 16  # requests whose current group is remembered; the oldest ones have ended long ago


class Clock:
    """The toy executor's `override`.

    Args:
        latency: seconds from a token's choice, which is when this is called, until the host may see it. What an
            iteration takes to submit is not in it, so the time told is early by up to that, and never late.
        now: seconds.
    """

    def __init__(self, latency: float, now: Callable[[], float] = time.monotonic) -> None:
        self._latency = latency
        self._now = now
        self._digits: dict[str, str] = {}

    def __call__(self, request_id: str, length: int, token: int) -> int:
        """The byte that follows `length` ids."""
        place = length % (1 + NUM_DIGITS)
        if place:
            return ord(self._digits.get(request_id, "." * NUM_DIGITS)[place - 1])
        ticks = round((self._now() + self._latency) * TICKS_PER_SECOND) % 10**NUM_DIGITS
        self._digits[request_id] = f"{ticks:0{NUM_DIGITS}d}"
        if len(self._digits) > _MAX_OPEN:
            del self._digits[next(iter(self._digits))]
        return ord(" ")


def age_of(group: str, seen: float) -> float:
    """Seconds from what seven digits tell to `seen`, a time of the same clock."""
    return (seen - int(group) / TICKS_PER_SECOND) % WRAP_SECONDS


def clock_latency(model: str) -> float:
    """Seconds of an iteration of `preset:clock-<milliseconds>`. Raises ConfigError."""
    text = model.removeprefix(CLOCK_PREFIX)
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise ConfigError(f"{model!r} needs milliseconds from 1 to 10000, as in preset:clock-25", param="model")
    return int(text) / 1000
