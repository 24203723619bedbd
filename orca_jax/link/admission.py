"""How much the server takes on at once, and how long a call may take."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.link.errors import CallTooLarge, Overloaded
from orca_jax.server_config import ServerConfig


@dataclass(frozen=True)
class Deadlines:
    """Seconds from now: `queue` for the first update of every request of a call, `total` for the last."""

    queue: float | None = None
    total: float | None = None

    def within(self, limits: "Deadlines") -> "Deadlines":
        """The stricter one of both, each."""
        return Deadlines(_least(self.queue, limits.queue), _least(self.total, limits.total))


NO_DEADLINES = Deadlines()


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


class Admission:
    """Counts what is open. A call is admitted whole or refused whole.

    Open requests are at most the engine's rows and `max_num_queued_reqs`; the prompts of those that have not had
    their first update hold at most `max_num_queued_tokens` tokens. `num_rows` is known once the engine serves.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.num_rows = 0
        self.open_requests = 0
        self.waiting_tokens = 0
        self._max_queued = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens

    def admit(self, prompt_lengths: Sequence[int]) -> None:
        """Count the requests of a call in.

        Raises:
            Overloaded: there is no room now.
            CallTooLarge: there never is.
        """
        count, tokens = len(prompt_lengths), sum(prompt_lengths)
        limit = self.num_rows + self._max_queued
        if count > limit:
            message = f"this call makes {count} requests, and the server holds {limit} at once; send it in parts"
            raise CallTooLarge(message, "n")
        if tokens > self._max_tokens:
            message = f"this call has {tokens} prompt tokens; the server queues {self._max_tokens}; send it in parts"
            raise CallTooLarge(message, "prompt")
        if self.open_requests + count > limit:
            raise Overloaded("the queue is full; try again later", "queue_full")
        if self.waiting_tokens + tokens > self._max_tokens:
            raise Overloaded("too many prompt tokens are waiting; try again later", "overloaded")
        self.open_requests += count
        self.waiting_tokens += tokens

    def started(self, prompt_length: int) -> None:
        """A request had its first update."""
        self.waiting_tokens -= prompt_length

    def left(self, waiting_length: int) -> None:
        """A request ended; `waiting_length` is its prompt's where it had had no update, else 0."""
        self.open_requests -= 1
        self.waiting_tokens -= waiting_length
