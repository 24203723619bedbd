"""Values that a caller of the engine passes and gets: parameters, urgency, updates."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

from orca_jax.values.cache_hints import CacheHints
from orca_jax.values.checks import (
    REFUSED_SAMPLING,
    did_you_mean,
    structured_form,
    unknown_name,
)
from orca_jax.values.errors import RequestError

REST_OF_CONTEXT = 2**31 - 1
"""The `max_tokens` of a request that may fill the context; `LLM` puts the number of tokens in its place."""

# most probable tokens that a request may ask for; a shape of the compiled sampler
MAX_LOGPROBS = 20
MAX_CANDIDATES = 128  # texts generated for one prompt
# ids that a request may bias or score; OpenAI's limit of biases, and a shape of the compiled sampler
MAX_LOGIT_BIAS = 300

FinishReason = Literal["stop", "length", "abort", "error"]

TokenSet = int
"""A set of token ids as the bits of an integer: bit i is id i."""


MAX_PRIORITY = 100  # priorities lie between -100 and 100: the bound keeps requests from starving


class Range(NamedTuple):
    """The range of a numeric field. Both ends are included, unless `excludes_low`; infinity never is."""

    low: float
    high: float
    excludes_low: bool = False
    is_integer: bool = False
    wording: str = ""  # for error messages; empty: derived from the ends

    def has(self, value: object) -> bool:
        """True for a number in this range. A boolean is not a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        if self.excludes_low and value == self.low:
            return False
        return self.low <= value <= self.high and value != math.inf

    @property
    def text(self) -> str:
        """The range in words, for error messages."""
        if self.is_integer:
            return self.wording or f"an integer from {self.low} to {self.high}"
        begin = "(" if self.excludes_low else "["
        return self.wording or f"a number in {begin}{self.low}, {self.high}]"


# The only table of ranges. `SamplingParams`, `Urgency` and the fields of the API (`openai/schema`) are checked with it.
RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, excludes_low=True),
    "top_k": Range(-1, 2**31 - 1, is_integer=True, wording="an integer >= 1, or 0 (or -1) for all"),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**63 - 1, is_integer=True, wording="a 64-bit integer"),
    "n": Range(1, MAX_CANDIDATES, is_integer=True),
    "max_tokens": Range(1, math.inf, is_integer=True, wording="an integer >= 1"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    # for each bias
    "logit_bias": Range(-100, 100, wording="a map of ids to numbers in [-100, 100]"),
    "logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY, is_integer=True),
    **dict.fromkeys(
        ("deadline", "ttft", "tpot"),
        Range(0, math.inf, excludes_low=True, wording="a number of seconds above 0"),
    ),
    "weight": Range(0, 1000, excludes_low=True),
}
# for each element of a list of ids
TOKEN_ID = Range(0, 2**31 - 1, is_integer=True, wording="token ids")


class TokenLogprobs(NamedTuple):
    """One token under the model's own distribution: before temperature, filters, penalties, biases and masks."""

    logprob: float
    rank: int  # more probable tokens, plus one
    top_ids: tuple[int, ...] = ()  # the most probable tokens, as many as requested, best first
    top_logprobs: tuple[float, ...] = ()
    # with `logprob_token_ids`: `top_ids` are these ids, and this is the probability of all others together
    others: float | None = None


Pooling = Literal["last", "mean"]
"""The embedding of a prompt: the hidden vector of its last token, or the mean of all of them."""

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "composed"]


class NamesChecked:
    """Base of values constructed by callers: an unknown argument raises RequestError, with a suggestion."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _refused: ClassVar[Mapping[str, str]] = {}  # arguments of vLLM's class, with reasons

    def __new__(cls, *_: object, **values: object) -> Self:
        known = cls.__dataclass_fields__
        if not values.keys() <= known.keys():
            name = next(name for name in values if name not in known)
            reason = cls._refused.get(name)
            message = f"{name} is refused: {reason}"
            if reason is None:
                message = unknown_name(cls.__name__, name, known)
            raise RequestError(message, param=name)
        return super().__new__(cls)


@dataclass(frozen=True)
class StructuredOutput(NamesChecked):
    """A constraint on the generated text. `kind` gives the format of `value`.

    Raises:
        RequestError: `kind` is unknown, or `value` is not a string.
    """

    kind: StructuredKind
    # a JSON schema, a regular expression, a JSON list of strings, a Lark grammar, or several of
    # them
    value: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(StructuredKind)
        if self.kind not in kinds:
            message = f"kind must be one of {', '.join(kinds)}, got {self.kind!r}{did_you_mean(self.kind, kinds)}"
            raise RequestError(message, param="kind")
        require(isinstance(self.value, str), "value", "a string", self.value)


def token_set(ids: Iterable[int]) -> TokenSet:
    """The set of these ids."""
    ids = list(ids)
    # not one integer after another: each is as long as the vocabulary
    flags = bytearray(max(ids, default=0) // 8 + 1)
    for token_id in ids:
        flags[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(flags, "little")


class Constraint(Protocol):
    """The ids that a request may generate next. `accept` is called for every id generated so far."""

    def allowed(self) -> TokenSet:
        """The ids allowed next.

        Raises:
            RequestError: they cannot be computed; the request then ends with reason "error".
        """
        ...

    def accept(self, token_id: int) -> None:
        """Record the generated id, one of `allowed`."""
        ...


@dataclass(frozen=True)
class SamplingParams(NamesChecked):
    """Rules for choosing a request's tokens and for ending it.

    `max_tokens=None` is `REST_OF_CONTEXT`. `structured_outputs` is vLLM's form of `structured`.

    The last group of fields is about text. The engine sees only ids: `LLM` and the server handle these fields, or
    convert them into the fields above. The engine refuses `stop`, `bad_words` and several candidates, and ignores the
    others.

    Raises:
        RequestError: an argument is unknown, or a value has the wrong type or is out of range; `param` names it.
    """

    max_tokens: int = 16  # maximum number of generated tokens
    temperature: float = 1.0  # 0 is greedy
    # sample from the smallest set of tokens with at least this total probability; (0, 1]
    top_p: float = 1.0
    top_k: int = 0  # sample from the k most probable tokens; 0 for all
    # exclude tokens with less than this fraction of the highest probability; [0, 1]
    min_p: float = 0.0
    seed: int | None = None  # None: chosen by the engine
    # these end the request, in addition to the model's end tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # do not end at the model's end tokens
    min_tokens: int = 0  # minimum number of generated tokens before an end token
    # subtracted from the logit of every token generated so far; [-2, 2]
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0  # the same, once for each time it was generated; [-2, 2]
    # divides positive logits of tokens in prompt and output, multiplies negative; > 0
    repetition_penalty: float = 1.0
    # id -> number added to its logit; [-100, 100]
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # only these are generated; list end tokens to allow them
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not be generated
    # return those of the generated tokens and of this many most probable ones
    logprobs: int | None = None
    # return those of these ids instead of the most probable ones; needs `logprobs` None or 0
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # the same for the prompt's tokens after the first
    cache_salt: str = ""  # only requests with the same salt share prefix-cache pages
    # tokens at the begin of the prompt that other requests of the same call have, too: one computes them
    shared_tokens: int = 0
    structured: StructuredOutput | None = None  # constraint on the text; requires a tokenizer
    # wishes about the pages that it leaves in the prefix cache, for `--retention`
    cache_hints: CacheHints | None = None

    stop: tuple[str, ...] = ()  # strings that end the request and are cut from the text
    include_stop_str_in_output: bool = False  # keep them in the text
    # words that must not be generated; converted into `bad_token_ids`
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True  # leave special tokens out of the text
    detokenize: bool = True  # make the text; False needs no `stop`
    n: int = 1  # candidates: texts generated for the prompt

    # return an embedding of the prompt and generate nothing; set by `LLM.embed`
    pooling: Pooling | None = None
    # json, regex, choice, grammar or json_object; moved into `structured`
    structured_outputs: Any = None

    _refused: ClassVar[Mapping[str, str]] = REFUSED_SAMPLING

    @property
    def has_penalty(self) -> bool:
        """True if logits depend on the tokens of the context."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def has_extras(self) -> bool:
        """True if the request needs the full sampler, at some cost in time for the whole launch."""
        return self.has_penalty or bool(self.logit_bias) or self.logprobs is not None

    def __post_init__(self) -> None:
        # Lists become tuples. A frozen dataclass has no other way to convert a field.
        if self.structured_outputs is not None:
            require(
                self.structured is None,
                "structured_outputs",
                "None beside structured",
                self.structured_outputs,
            )
            object.__setattr__(
                self, "structured", StructuredOutput(*structured_form(self.structured_outputs))
            )
            object.__setattr__(self, "structured_outputs", None)
        if getattr(self, "max_tokens") is None:  # noqa: B009 - a caller may give it
            object.__setattr__(self, "max_tokens", REST_OF_CONTEXT)
        for name in ("stop_token_ids", "stop", "bad_words"):
            if type(values := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, _as_tuple(name, values))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids)
            )
        if self.bad_token_ids != ():
            sequences = _as_tuple("bad_token_ids", self.bad_token_ids)
            object.__setattr__(
                self, "bad_token_ids", tuple(_as_tuple("bad_token_ids", ids) for ids in sequences)
            )
        if self.logprob_token_ids != ():
            ids = _as_tuple("logprob_token_ids", self.logprob_token_ids or ())
            object.__setattr__(self, "logprob_token_ids", ids)
            if ids and self.logprobs is None:
                object.__setattr__(self, "logprobs", 0)
        if getattr(self, "logit_bias") is None:  # noqa: B009 - a caller may give it
            object.__setattr__(self, "logit_bias", {})
        self._check_types()
        self._check_draw()
        self._check_end()
        self._check_logits()
        self._check_text()

    def _check_types(self) -> None:
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if type(value := getattr(self, name)) is not bool:
                require(False, name, "true or false", value)
        require(isinstance(self.cache_salt, str), "cache_salt", "a string", self.cache_salt)
        if self.cache_hints is not None:
            are_hints = isinstance(self.cache_hints, CacheHints)
            require(are_hints, "cache_hints", "CacheHints or None", self.cache_hints)
        require(
            isinstance(self.logit_bias, Mapping),
            "logit_bias",
            RANGES["logit_bias"].text,
            self.logit_bias,
        )
        is_structured = self.structured is None or isinstance(self.structured, StructuredOutput)
        require(is_structured, "structured", "a StructuredOutput or None", self.structured)
        if self.pooling is not None:
            require(
                self.pooling in get_args(Pooling),
                "pooling",
                " or ".join(get_args(Pooling)),
                self.pooling,
            )
            require(
                self.prompt_logprobs is None,
                "prompt_logprobs",
                "None with pooling",
                self.prompt_logprobs,
            )

    def _check_draw(self) -> None:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            _check(name, getattr(self, name))
        if self.seed is not None:
            _check("seed", self.seed)

    def _check_end(self) -> None:
        _check("n", self.n)
        _check("max_tokens", self.max_tokens)
        _check_ids("stop_token_ids", self.stop_token_ids)
        holds = Range(0, self.max_tokens, is_integer=True).has(self.min_tokens)
        require(
            holds,
            "min_tokens",
            f"an integer from 0 to max_tokens ({self.max_tokens})",
            self.min_tokens,
        )

    def _check_logits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            _check(name, getattr(self, name))
        num_biases = len(self.logit_bias)
        require(
            num_biases <= MAX_LOGIT_BIAS, "logit_bias", f"{MAX_LOGIT_BIAS} ids at most", num_biases
        )
        self._check_scored(MAX_LOGIT_BIAS - num_biases)
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias)
        if self.allowed_token_ids is not None:
            require(
                bool(self.allowed_token_ids),
                "allowed_token_ids",
                "at least one id",
                self.allowed_token_ids,
            )
            _check_ids("allowed_token_ids", self.allowed_token_ids)
        for ids in self.bad_token_ids:
            require(bool(ids), "bad_token_ids", "a list of sequences that are not empty", ids)
            _check_ids("bad_token_ids", ids)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check(name, count)

    def _check_scored(self, most: int) -> None:
        """Check the ids to score, and the tokens that are shared. `most` is the room that biases leave."""
        is_count = Range(0, TOKEN_ID.high, is_integer=True).has(self.shared_tokens)
        require(is_count, "shared_tokens", "a number of tokens", self.shared_tokens)
        ids = self.logprob_token_ids
        if not ids:
            return
        _check_ids("logprob_token_ids", ids)
        fits = len(set(ids)) == len(ids) <= most
        require(fits, "logprob_token_ids", f"at most {most} different ids", f"{len(ids)} ids")
        fits = not self.logprobs
        require(fits, "logprobs", "0 or None with logprob_token_ids", self.logprobs)

    def _check_text(self) -> None:
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            holds = all(isinstance(string, str) and string for string in strings)
            require(holds, name, "a list of strings that are not empty", strings)
        require(self.detokenize or not self.stop, "stop", "empty with detokenize=False", self.stop)


def _check(param: str, value: object) -> None:
    known = RANGES[param]
    if not known.has(value):
        raise RequestError(f"{param} must be {known.text}, got {value!r}", param=param)


def _as_tuple(param: str, values: object) -> tuple[Any, ...]:
    """Return the values of a list. As in vLLM, None is the empty list, and one string a list of it."""
    if values is None:
        return ()
    if isinstance(values, str) and param in ("stop", "bad_words"):
        return (values,)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{param} must be a list, got {values!r}", param=param)
    return tuple(values)


def _check_ids(param: str, ids: Collection[int]) -> None:
    if not ids or (
        set(map(type, ids)) == {int} and TOKEN_ID.has(min(ids)) and TOKEN_ID.has(max(ids))
    ):
        return  # fast path: a list may contain a whole vocabulary
    for token in ids:
        require(TOKEN_ID.has(token), param, TOKEN_ID.text, token)


def require(holds: bool, param: str, what: str, got: object) -> None:
    """Raise RequestError unless a condition holds: `param` must be `what`."""
    if not holds:
        raise RequestError(f"{param} must be {what}, got {got!r}", param=param)


def of_candidate(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one candidate: with its own seed, and the prompt's log probabilities once."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else candidate_seed(params.seed, index)
    return replace(
        params, n=1, seed=seed, prompt_logprobs=None if index else params.prompt_logprobs
    )


def candidate_seed(seed: int, index: int) -> int:
    """Return the seed of a candidate: the sum, within 64 bits."""
    return (seed + index + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True)
class Urgency(NamesChecked):
    """Inputs of schedulers. Each ordering uses one of the first three, and `fcfs` none; policies may read all.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    priority: int = 0  # lower values run earlier
    tenant: str = ""  # for fair sharing of the engine; the empty string is a tenant too
    deadline: float | None = None  # seconds after arrival; None: no deadline
    program: str = ""  # the requests of one agent or conversation have the same one; empty: alone
    weight: float = 1.0  # share of the engine, relative to others
    ttft: float | None = None  # wanted seconds to the first token
    tpot: float | None = None  # wanted seconds between two tokens

    def __post_init__(self) -> None:
        for name in ("priority", "weight"):
            _check(name, getattr(self, name))
        for name in ("deadline", "ttft", "tpot"):
            if (value := getattr(self, name)) is not None:
                _check(name, value)


DEFAULT_URGENCY = Urgency()
URGENCY_FIELDS: tuple[str, ...] = tuple(each.name for each in fields(Urgency))
"""What callers can tell schedulers and orders."""


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock. The time of a token is the time of its delivery.

    They are sent with the first ids and with the last: a client that disconnects never gets the last ones.
    """

    arrival: float
    first_scheduled: float
    first_token: float
    # time of the update with these metrics; in the last update, the end of the request
    finished: float


class RequestUpdate(NamedTuple):
    """The result of an iteration for one request, in ids, as delivered by the engine."""

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with finish_reason "error"
    metrics: RequestMetrics | None = None  # with the first ids, and with "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `new_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first ids, if requested
    num_cached: int = 0  # tokens of the prompt read from the prefix cache
    pooled: bytes | None = None  # the last one with `pooling`: a vector of float32, not normalised
    num_written: int = 0  # tokens of the prompt written into the prefix cache, with the first ids
    # seconds since the cache gave up a page of the prompt, and the request that needed room
    lost: tuple[float, str | None] | None = None
    weight_version: int | None = None  # of the front end, if the call began with other weights


_OTHERS = tuple(RequestUpdate._field_defaults.values())


def plain_update(request_id: str, new_ids: tuple[int, ...]) -> RequestUpdate:
    """An update whose other fields have their defaults, as nearly all have. It is quicker than `RequestUpdate(...)`."""
    own = (request_id, new_ids)
    return tuple.__new__(RequestUpdate, own + _OTHERS)
