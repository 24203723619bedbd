"""The clock model: its text is the time, to measure the delay between a model and its client.

`preset:clock-25` is the toy with iterations of 25 milliseconds. For any prompt, its text consists of groups of a space
and seven digits, such as " 0123456", with one character per token. The digits are the time of the group's space, in
ticks of the machine's monotonic clock. So a client on the same machine can compute the age of a group. If a stream
begins within a group, the missing digits are dots.
"""

import time
from collections.abc import Callable

from orca_jax.values.checks import short, whole_number
from orca_jax.values.errors import ConfigError

CLOCK_PREFIX = "preset:clock-"
TICKS_PER_SECOND = 10_000
NUM_DIGITS = 7
WRAP_SECONDS = 10**NUM_DIGITS / TICKS_PER_SECOND  # after which the digits repeat

_MAX_OPEN = 1 << 16  # requests with a remembered group; the oldest ones have ended long ago


class Clock:
    """The toy executor's `override`.

    Args:
        latency: seconds from a token's choice, at the call of this object, to its arrival at the host. It excludes the
            time to submit an iteration, so the reported time may be early by up to this time, and is never late.
        now: returns the time in seconds.
    """

    def __init__(self, latency: float, now: Callable[[], float] = time.monotonic) -> None:
        self._latency = latency
        self._now = now
        self._digits: dict[str, str] = {}

    def __call__(self, request_id: str, length: int, token: int) -> int:
        """The byte after `length` ids."""
        place = length % (1 + NUM_DIGITS)
        if place:
            return ord(self._digits.get(request_id, "." * NUM_DIGITS)[place - 1])
        ticks = round((self._now() + self._latency) * TICKS_PER_SECOND) % 10**NUM_DIGITS
        self._digits[request_id] = f"{ticks:0{NUM_DIGITS}d}"
        if len(self._digits) > _MAX_OPEN:
            del self._digits[next(iter(self._digits))]
        return ord(" ")


def age_of(group: str, seen: float) -> float:
    """Seconds from the time in seven digits to `seen`, a time of the same clock."""
    return (seen - int(group) / TICKS_PER_SECOND) % WRAP_SECONDS


def clock_latency(model: str) -> float:
    """Seconds of an iteration of `preset:clock-<milliseconds>`.

    Raises:
        ConfigError: the milliseconds are not an integer from 1 to 10000.
    """
    milliseconds = whole_number(model.removeprefix(CLOCK_PREFIX))
    if milliseconds is None or not 1 <= milliseconds <= 10_000:
        raise ConfigError(
            f"{short(model)} needs milliseconds from 1 to 10000, as in preset:clock-25",
            param="model",
        )
    return milliseconds / 1000
