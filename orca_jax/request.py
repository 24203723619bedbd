"""A request: one prompt and its sampling parameters; it owns its generated ids."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from orca_jax.errors import RequestError
from orca_jax.step import MAX_LOGIT_BIAS, MAX_LOGPROBS, TokenLogprobs, TokenSet

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_PRIORITY = 100  # and its negative: further apart nobody may be, so that nobody waits for ever


class Range(NamedTuple):
    """The numbers that a field takes. Both ends belong to it, unless `excludes_low`; infinity never does."""

    low: float
    high: float
    excludes_low: bool = False
    is_integer: bool = False
    wording: str = ""  # in error messages; empty: made from the ends

    def has(self, value: object) -> bool:
        """True for a number of this range. Booleans are not numbers."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        is_above = self.low < value if self.excludes_low else self.low <= value
        return is_above and value <= self.high and value != math.inf

    @property
    def text(self) -> str:
        """The range in words."""
        if self.is_integer:
            return self.wording or f"an integer from {self.low} to {self.high}"
        return self.wording or f"a number in {'(' if self.excludes_low else '['}{self.low}, {self.high}]"


# The only table of ranges: `SamplingParams`, `Urgency` and the fields of the API (`openai/schema`) are checked by it.
RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, excludes_low=True),
    "top_k": Range(-1, 2**31 - 1, is_integer=True, wording="an integer >= 1, or 0 (or -1) for all"),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**63 - 1, is_integer=True, wording="a 64-bit integer"),
    "max_tokens": Range(1, math.inf, is_integer=True, wording="an integer >= 1"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    "logit_bias": Range(-100, 100, wording="a map of ids to numbers in [-100, 100]"),  # of each bias
    "logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY, is_integer=True),
    "deadline": Range(0, math.inf, excludes_low=True, wording="a number of seconds above 0"),
}
TOKEN_ID = Range(0, 2**31 - 1, is_integer=True, wording="token ids")  # the element of every list of ids


class State(Enum):
    """The states of Algorithm 1, and the end."""

    INITIATION = "initiation"  # prompt tokens are still to be processed
    RUNNING = "running"  # member of an iteration in flight
    INCREMENT = "increment"  # one generated token at a time
    FINISHED = "finished"


@dataclass(frozen=True)
class StructuredOutput:
    """What the generated text must match. `kind` says how `value` is read."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""  # a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar


class Constraint(Protocol):
    """Which ids a request may generate next. It has been told of every id that the request generated so far."""

    def allowed(self) -> TokenSet:
        """The ids that may come next.

        Raises:
            RequestError: it cannot be said; the request then ends with reason "error".
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take in the id that was generated, which `allowed` held."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    The last group is about text, which the engine never sees: a face (`LLM`, the server) turns it into the fields
    above or handles it, and the engine refuses what is left of it.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    max_tokens: int = 16  # generated tokens at most
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability; (0, 1]
    top_k: int = 0  # the k most probable tokens; 0 for all
    min_p: float = 0.0  # tokens with at least this share of the most probable one's probability; [0, 1]
    seed: int | None = None  # None: drawn by the engine
    stop_token_ids: tuple[int, ...] = ()  # end the request, beside the model's own end tokens
    ignore_eos: bool = False  # do not end at the model's end tokens
    min_tokens: int = 0  # generated tokens before any end token may come
    presence_penalty: float = 0.0  # taken from the logit of every token generated so far; [-2, 2]
    frequency_penalty: float = 0.0  # the same, times how often it was generated; [-2, 2]
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt and output, multiplies negative; > 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> what is added to its logit; [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is generated, end tokens apart only if listed
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are never generated
    logprobs: int | None = None  # log probabilities of the generated tokens, and of so many most probable ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens from the second on
    cache_salt: str = ""  # computed pages are shared only among requests of one salt
    structured: StructuredOutput | None = None  # what the text must match; needs a tokenizer behind the engine

    stop: tuple[str, ...] = ()  # strings that end the request; not part of the text
    include_stop_str_in_output: bool = False  # make them part of it
    bad_words: tuple[str, ...] = ()  # words that are never generated; become `bad_token_ids`
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        # Lists are kept as tuples. A frozen class of the standard library has no other way to convert a field.
        for name in ("stop_token_ids", "stop", "bad_words"):
            if type(values := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, tuple(values))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.bad_token_ids != ():
            object.__setattr__(self, "bad_token_ids", tuple(tuple(ids) for ids in self.bad_token_ids))
        self._check_draw()
        self._check_end()
        self._check_logits()
        self._check_text()

    def _check_draw(self) -> None:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            _check(name, getattr(self, name))
        if self.seed is not None:
            _check("seed", self.seed)

    def _check_end(self) -> None:
        _check("max_tokens", self.max_tokens)
        _check_ids("stop_token_ids", self.stop_token_ids)
        holds = Range(0, self.max_tokens, is_integer=True).has(self.min_tokens)
        _require(holds, "min_tokens", f"an integer from 0 to max_tokens ({self.max_tokens})", self.min_tokens)

    def _check_logits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            _check(name, getattr(self, name))
        num_biases = len(self.logit_bias)
        _require(num_biases <= MAX_LOGIT_BIAS, "logit_bias", f"{MAX_LOGIT_BIAS} ids at most", num_biases)
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias)
        if self.allowed_token_ids is not None:
            _require(bool(self.allowed_token_ids), "allowed_token_ids", "at least one id", self.allowed_token_ids)
            _check_ids("allowed_token_ids", self.allowed_token_ids)
        for ids in self.bad_token_ids:
            _require(bool(ids), "bad_token_ids", "a list of sequences that are not empty", ids)
            _check_ids("bad_token_ids", ids)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check(name, count)

    def _check_text(self) -> None:
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            holds = all(isinstance(string, str) and string for string in strings)
            _require(holds, name, "a list of strings that are not empty", strings)


def _check(param: str, value: object) -> None:
    known = RANGES[param]
    if not known.has(value):
        raise RequestError(f"{param} must be {known.text}, got {value!r}", param=param)


def _check_ids(param: str, ids: Collection[int]) -> None:
    if not ids or (set(map(type, ids)) == {int} and TOKEN_ID.has(min(ids)) and TOKEN_ID.has(max(ids))):
        return  # the usual case at once, since a list may hold a whole vocabulary
    for token in ids:
        _require(TOKEN_ID.has(token), param, TOKEN_ID.text, token)


def _require(holds: bool, param: str, what: str, got: object) -> None:
    if not holds:
        raise RequestError(f"{param} must be {what}, got {got!r}", param=param)


@dataclass(frozen=True, slots=True)
class Urgency:
    """What a scheduler's ordering may look at; each looks at one of these, and `fcfs` at none.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    priority: int = 0  # lower is sooner
    tenant: str = ""  # who shares the engine with others; the empty one is a tenant too
    deadline: float | None = None  # seconds after its arrival; None: it has time

    def __post_init__(self) -> None:
        _check("priority", self.priority)
        if self.deadline is not None:
            _check("deadline", self.deadline)


USUAL = Urgency()


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
    constraint: Constraint | None = None
    urgency: Urgency = USUAL
    predicted_output: float = 0.0  # tokens that it was thought to generate in all, when it arrived
    state: State = State.INITIATION
    generated_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the generated ids, where asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's ids from the second on
    num_computed: int = 0
    num_iterations: int = 0
    num_delivered: int = 0  # generated ids already handed out
    row: int | None = None  # held from the first iteration to the end, or to a preemption
    in_flight: int = 0  # iterations submitted and not yet collected
    num_pending: int = 0  # tokens that these sample, so that they are on the device only
    num_cached: int = 0  # tokens of the prompt whose pages were there before it was admitted first
    page_digests: list[bytes] = field(default_factory=list)  # of its first full pages, a chain
    num_remembered: int = 0  # pages that others can find by these
    has_ended: bool = False  # its last update was handed out; it stays while an iteration is in flight
    finish_reason: FinishReason | None = None
    error: str | None = None  # why no further token can be chosen; the request ends with reason "error"
    aborted: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def num_left(self) -> int:
        """Tokens to process now, those of iterations in flight included; 0 for a request that is about to end."""
        if self.num_pending and len(self.generated_ids) + self.num_pending >= self.params.max_tokens:
            return 0
        return self.num_tokens + self.num_pending - self.num_computed

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
    """Times of one request in seconds on the engine's clock; a token's time is when it was handed out.

    They come with its first ids, since whoever hangs up never sees the end, and with its last.
    """

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float  # of the update that brings these times: with the last one, the end


class RequestUpdate(NamedTuple):
    """What an iteration brought to one request: handed out by the engine, in ids."""

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with finish_reason "error"
    metrics: RequestMetrics | None = None  # with the first ids, and with "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `new_ids`, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first ids, where asked for
    num_cached: int = 0  # tokens of the prompt that were not computed again


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text, in vLLM's shape."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the stop string, or the id of `stop_token_ids`, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, where asked for
    cumulative_logprob: float | None = None  # their sum


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, in vLLM's shape."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    metrics: RequestMetrics | None = None  # None where an error or a stop string ended it
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt's ids from the second on
