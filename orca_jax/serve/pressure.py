"""How much the server takes on at once, and how long a call may take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.request import SamplingParams
from orca_jax.serve.api_error import ApiError
from orca_jax.serve.config import ServerConfig

RETRY_SECONDS = 1  # what a refused client is told to wait at least; clients double it by themselves
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat 408, 409, 429 and 5xx unless told


class EngineRequest(NamedTuple):
    """What the engine has to know of a request."""

    prompt_ids: list[int]
    params: SamplingParams


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


def queue_timeout() -> ApiError:
    """The engine had no room in time; another replica may have."""
    message = "the request waited longer for the engine than it was allowed to; try again later"
    return ApiError(503, message, code="queue_timeout", headers={"retry-after": str(RETRY_SECONDS)})


def total_timeout() -> ApiError:
    """The answer took too long, and would again."""
    message = "the request took longer than it was allowed to; ask for fewer tokens or for more time"
    return ApiError(408, message, code="timeout", headers=NO_RETRY)


def reader_too_slow() -> ApiError:
    """Nobody will read this, except in a log."""
    return ApiError(408, "the client takes the answer too slowly", code="client_too_slow", headers=NO_RETRY)


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
        self._status = config.overload_status

    def admit(self, prompt_lengths: Sequence[int]) -> None:
        """Count the requests of a call in.

        Raises:
            ApiError: there is no room now (503 or 429), or there never is (400).
        """
        count, tokens = len(prompt_lengths), sum(prompt_lengths)
        limit = self.num_rows + self._max_queued
        if count > limit:
            message = f"this call makes {count} requests, and the server holds {limit} at once; send it in parts"
            raise ApiError(400, message, "n", code="call_too_large")
        if tokens > self._max_tokens:
            message = f"this call has {tokens} prompt tokens; the server queues {self._max_tokens}; send it in parts"
            raise ApiError(400, message, "prompt", code="call_too_large")
        if self.open_requests + count > limit:
            raise self._full("the queue is full; try again later", "queue_full")
        if self.waiting_tokens + tokens > self._max_tokens:
            raise self._full("too many prompt tokens are waiting; try again later", "overloaded")
        self.open_requests += count
        self.waiting_tokens += tokens

    def started(self, prompt_length: int) -> None:
        """A request had its first update."""
        self.waiting_tokens -= prompt_length

    def left(self, waiting_length: int) -> None:
        """A request ended; `waiting_length` is its prompt's where it had had no update, else 0."""
        self.open_requests -= 1
        self.waiting_tokens -= waiting_length

    def _full(self, message: str, code: str) -> ApiError:
        return ApiError(self._status, message, code=code, headers={"retry-after": str(RETRY_SECONDS)})
