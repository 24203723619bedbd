"""A request: one prompt and its sampling parameters; it owns its generated ids."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from orca_jax.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    """The states of Algorithm 1, and the end."""

    INITIATION = "initiation"  # prompt tokens are still to be processed
    RUNNING = "running"  # member of an iteration in flight
    INCREMENT = "increment"  # one generated token at a time
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    max_tokens: int = 16  # generated tokens at most
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability; (0, 1]
    top_k: int = 0  # the k most probable tokens; 0 for all
    seed: int | None = None  # None: drawn by the engine
    stop_token_ids: tuple[int, ...] = ()  # end the request, beside the model's own end tokens
    ignore_eos: bool = False  # do not end at the model's end tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer >= 1", self.max_tokens)
        _require(_in(self.temperature, 0, 2), "temperature", "a number in [0, 2]", self.temperature)
        _require(_in(self.top_p, 0, 1) and self.top_p > 0, "top_p", "a number in (0, 1]", self.top_p)
        _require(
            _is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            "an integer >= 1, or 0 (or -1) for all",
            self.top_k,
        )
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            "a 64-bit integer",
            self.seed,
        )
        for token in self.stop_token_ids:
            _require(_is_int(token) and 0 <= token < 2**31, "stop_token_ids", "a list of token ids", token)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, param: str, what: str, got: object) -> None:
    if not holds:
        raise RequestError(f"{param} must be {what}, got {got!r}", param=param)


@dataclass(eq=False, slots=True)
class Request:
    """One request in the pool, which owns it; every field below `seed` changes only there.

    `num_computed` counts the tokens whose K and V are in the cache. Preemption sets it back to 0, and
    the generated ids are then processed again like a prompt.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float  # seconds, on the engine's clock
    arrival_index: int  # order of arrival, unique
    seed: int  # resolved: never None
    stop_ids: frozenset[int]  # end tokens of this request
    state: State = State.INITIATION
    generated_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_iterations: int = 0
    num_delivered: int = 0  # generated ids already handed out
    row: int | None = None  # held from the first iteration to the end
    in_flight: int = 0  # iterations submitted and not yet collected
    finish_reason: FinishReason | None = None
    aborted: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def max_total(self) -> int:
        """The paper's `max_tokens`: slots that the request may need at most."""
        return len(self.prompt_ids) + self.params.max_tokens

    def ids_from(self, start: int, count: int) -> list[int]:
        """`count` ids of prompt and generated text from position `start`."""
        boundary = len(self.prompt_ids)
        if start >= boundary:
            return self.generated_ids[start - boundary : start - boundary + count]
        ids = self.prompt_ids[start : start + count]
        return ids + self.generated_ids[: count - len(ids)]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock; a token's time is when it was handed out."""

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float


class RequestUpdate(NamedTuple):
    """What an iteration brought to one request: handed out by the engine, in ids."""

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with finish_reason "error"
    metrics: RequestMetrics | None = None  # set with finish_reason "stop" or "length"


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text, in vLLM's shape."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, in vLLM's shape."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    metrics: RequestMetrics | None = None
