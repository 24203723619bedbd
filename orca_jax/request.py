"""Values passed to the engine and returned by it: parameters, urgency, updates, outputs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from orca_jax.errors import RequestError

MAX_LOGPROBS = 20  # most probable tokens per position of a request; a shape of the compiled sampler
MAX_LOGIT_BIAS = 300  # ids with a bias in one request; OpenAI's limit, and a shape of the compiled sampler

FinishReason = Literal["stop", "length", "abort", "error"]

TokenSet = int
"""A set of token ids as the bits of an integer: bit i is id i."""

MAX_PRIORITY = 100  # the lowest is its negative; the range bounds the wait of every request


class TokenLogprobs(NamedTuple):
    """One token under the model's own distribution: before temperature, filters, penalties, biases and masks."""

    logprob: float
    rank: int  # more probable tokens, plus one
    top_ids: tuple[int, ...] = ()  # the most probable tokens, as many as requested, best first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class StructuredOutput:
    """The required structure of the generated text: `kind` defines the meaning of `value`."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""  # a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar


class Constraint(Protocol):
    """Ids allowed next in one request; `accept` receives every generated id, in order."""

    def allowed(self) -> TokenSet:
        """The ids allowed next.

        Raises:
            RequestError: they cannot be computed; the request then ends with reason "error".
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by a generated id, one of those in `allowed`."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for the choice of a request's tokens, and for its end.

    The last group is about text. The engine has token ids only: `LLM` and the server handle these fields, or convert
    them into the fields above. The engine refuses `stop` and `bad_words`, and ignores the other two.

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
    min_tokens: int = 0  # generated tokens before an end token is allowed
    presence_penalty: float = 0.0  # taken from the logit of every token generated so far; [-2, 2]
    frequency_penalty: float = 0.0  # the same, times the number of its occurrences; [-2, 2]
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt and output, multiplies negative; > 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> value added to its logit; [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None  # only these are generated, end tokens only if listed
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are never generated
    logprobs: int | None = None  # log probabilities of generated tokens, and of this number of most probable ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens from the second on
    cache_salt: str = ""  # computed pages are shared only among requests of one salt
    structured: StructuredOutput | None = None  # structure of the text; needs a tokenizer, as in `LLM` and the server

    stop: tuple[str, ...] = ()  # strings that end the request; not part of the text
    include_stop_str_in_output: bool = False  # make them part of it
    bad_words: tuple[str, ...] = ()  # words that are never generated; become `bad_token_ids`
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_token_ids", tuple(tuple(ids) for ids in self.bad_token_ids))
        self._check_draw()
        self._check_end()
        self._check_logits()
        self._check_text()

    def _check_draw(self) -> None:
        _require(_in(self.temperature, 0, 2), "temperature", "a number in [0, 2]", self.temperature)
        _require(_in(self.top_p, 0, 1) and self.top_p > 0, "top_p", "a number in (0, 1]", self.top_p)
        _require(
            _is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            "an integer >= 1, or 0 (or -1) for all",
            self.top_k,
        )
        _require(_in(self.min_p, 0, 1), "min_p", "a number in [0, 1]", self.min_p)
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            "a 64-bit integer",
            self.seed,
        )

    def _check_end(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer >= 1", self.max_tokens)
        _require_ids("stop_token_ids", self.stop_token_ids)
        holds = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _require(holds, "min_tokens", f"an integer from 0 to max_tokens ({self.max_tokens})", self.min_tokens)

    def _check_logits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _require(_in(getattr(self, name), -2, 2), name, "a number in [-2, 2]", getattr(self, name))
        holds = _in(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0
        _require(holds, "repetition_penalty", "a number in (0, 100]", self.repetition_penalty)
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"{MAX_LOGIT_BIAS} ids at most", len(self.logit_bias)
        )
        _require_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            _require(_in(bias, -100, 100), "logit_bias", "a map of ids to numbers in [-100, 100]", bias)
        if self.allowed_token_ids is not None:
            _require(bool(self.allowed_token_ids), "allowed_token_ids", "at least one id", self.allowed_token_ids)
            _require_ids("allowed_token_ids", self.allowed_token_ids)
        for ids in self.bad_token_ids:
            _require(bool(ids), "bad_token_ids", "a list of sequences that are not empty", ids)
            _require_ids("bad_token_ids", ids)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            holds = count is None or (_is_int(count) and 0 <= count <= MAX_LOGPROBS)
            _require(holds, name, f"an integer from 0 to {MAX_LOGPROBS}", count)

    def _check_text(self) -> None:
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            holds = all(isinstance(string, str) and string for string in strings)
            _require(holds, name, "a list of strings that are not empty", strings)


def _require_ids(param: str, ids: Iterable[object]) -> None:
    for token in ids:
        holds = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
        _require(holds, param, "token ids", token)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, param: str, what: str, got: object) -> None:
    if not holds:
        raise RequestError(f"{param} must be {what}, got {got!r}", param=param)


@dataclass(frozen=True, slots=True)
class Urgency:
    """Inputs of orderings: `priority`, `fair` and `deadline` read one field each, `fcfs` and `shortest` none.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    priority: int = 0  # lower is sooner
    tenant: str = ""  # a user or key among those sharing the engine; the empty name is a tenant too
    deadline: float | None = None  # seconds after its arrival; None: no deadline

    def __post_init__(self) -> None:
        holds = _is_int(self.priority) and abs(self.priority) <= MAX_PRIORITY
        _require(holds, "priority", f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", self.priority)
        holds = self.deadline is None or (_in(self.deadline, 0, math.inf) and self.deadline > 0)
        _require(holds, "deadline", "a number of seconds above 0", self.deadline)


DEFAULT_URGENCY = Urgency()


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock; a token's time is the time of its delivery.

    The update with the first ids has them, since a disconnected client never receives the end. The last one has them
    too.
    """

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float  # of the update with these times: in the last one, the end


class RequestUpdate(NamedTuple):
    """New results of one request, delivered by the engine: its ids, or its end."""

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with finish_reason "error"
    metrics: RequestMetrics | None = None  # with the first ids, and with "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `new_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first ids, if requested
    num_cached: int = 0  # tokens of the prompt that were not computed again


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text, in vLLM's shape."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the stop string, or the id of `stop_token_ids`, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of `token_ids`, if requested
    cumulative_logprob: float | None = None  # their sum


@dataclass(frozen=True)
class RequestOutput:
    """A finished request, in vLLM's shape."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    metrics: RequestMetrics | None = None  # None if an error or a stop string ended it
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt's ids from the second on
