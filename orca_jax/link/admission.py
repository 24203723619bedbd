"""Admission control: bounds on the queue, and time limits of a call."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.link.errors import CallTooLarge, Overloaded
from orca_jax.server_config import ServerConfig


@dataclass(frozen=True)
class Deadlines:
    """Time limits of a call in seconds from now: `queue` until each request's first update, `total` until the end."""

    queue: float | None = None
    total: float | None = None

    def within(self, limits: "Deadlines") -> "Deadlines":
        """The stricter of both limits, for each field."""
        return Deadlines(_least(self.queue, limits.queue), _least(self.total, limits.total))


NO_DEADLINES = Deadlines()


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


class Admission:
    """Counts open requests. A call is admitted or refused as a whole.

    There are at most `num_rows` + `max_num_queued_reqs` open requests. The prompts of the open requests without an
    update hold at most `max_num_queued_tokens` tokens. The client sets `num_rows` when the engine serves.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.num_rows = 0
        self.open_requests = 0
        self.waiting_tokens = 0
        self._max_queued = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens

    def admit(self, prompt_lengths: Sequence[int]) -> None:
        """Add the requests of a call. Raises the same errors as `check`."""
        self.check(prompt_lengths)
        self.open_requests += len(prompt_lengths)
        self.waiting_tokens += sum(prompt_lengths)

    def check(self, prompt_lengths: Sequence[int]) -> None:
        """Refuse a call for which there is no room, also before its prompts are made.

        Raises:
            Overloaded: the queue has no room now.
            CallTooLarge: the call is larger than the queue.
        """
        count = len(prompt_lengths)
        tokens = sum(prompt_lengths)
        limit = self.num_rows + self._max_queued
        if count > limit:
            message = f"this call makes {count} requests, but the server holds at most {limit} at once; split the call"
            raise CallTooLarge(message, "n")
        if tokens > self._max_tokens:
            message = f"this call has {tokens} prompt tokens, but the queue holds {self._max_tokens}; split the call"
            raise CallTooLarge(message, "prompt")
        if self.open_requests + count > limit:
            raise Overloaded("the queue is full; try again later", "queue_full")
        if self.waiting_tokens + tokens > self._max_tokens:
            raise Overloaded("too many prompt tokens are queued; try again later", "overloaded")

    def started(self, prompt_length: int) -> None:
        """Count the first update of a request with this prompt length."""
        self.waiting_tokens -= prompt_length

    def left(self, waiting_length: int) -> None:
        """Remove a request that ended. `waiting_length` is its prompt length if it had no update, otherwise 0."""
        self.open_requests -= 1
        self.waiting_tokens -= waiting_length
