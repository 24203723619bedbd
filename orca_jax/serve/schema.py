"""`POST /v1/completions`: what comes in, checked, and what goes out, in OpenAI's shapes.

A field is honoured or rejected by name. `null` means "not given", as in OpenAI's own document.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.request import SamplingParams
from orca_jax.serve.api_error import ApiError

MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 4  # OpenAI's
DEFAULT_MAX_TOKENS = 16  # OpenAI's

# What clients may send although this server does nothing with it: field -> values that ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "prompt_logprobs": (),
    "suffix": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "cache_salt": (),
    "priority": (0,),
    "request_id": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
}

Prompt = str | list[int]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """The fields that this server honours."""

    model: str
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # names the client's end user, for the client's own books; changes nothing

    def prompts(self) -> list[Prompt]:
        """The prompts, one for each choice of the answer. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt) and self.prompt:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if not 1 <= len(self.prompt) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(self.prompt)}", "prompt")
        prompts = [part for part in self.prompt if not isinstance(part, int)]
        if len(prompts) < len(self.prompt) or len({type(part) for part in prompts}) > 1:
            raise ApiError(400, "prompt must be a string, token ids, or a list of one kind of these", "prompt")
        return prompts

    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise ApiError(400, f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}", "stop")
        if not all(stops):
            raise ApiError(400, "stop must not hold an empty string", "stop")
        return stops

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters; raises `RequestError` where a value is out of range."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }
        # Values are typed by the fields above; the mapping only leaves out what was not given.
        return SamplingParams(max_tokens, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct, frozen=True):
    """One text, or one more piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None


class Completion(msgspec.Struct, frozen=True):
    """An answer, or one chunk of a stream; `usage` is left out of a chunk where nobody asked for it."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """One line of `GET /v1/models`."""

    id: str
    created: int
    max_model_len: int  # vLLM's extension
    object: Literal["model"] = "model"
    owned_by: str = "orca-jax"


class ModelList(msgspec.Struct, frozen=True):
    """`GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_request_decoder = msgspec.json.Decoder(CompletionRequest)
_KNOWN = frozenset(CompletionRequest.__struct_fields__)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read and check a body, as far as that needs no model.

    Raises:
        ApiError: 400; `param` names the field.
    """
    try:
        for name, raw in _fields_decoder.decode(body).items():
            if name not in _KNOWN:
                _check_neutral(name, raw)
        request = _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    return request


def _check_neutral(name: str, raw: msgspec.Raw) -> None:
    if name not in NEUTRAL:
        raise ApiError(400, f"unknown parameter: {name[:100]!r}", name[:100], code="unknown_parameter")
    try:
        value = msgspec.json.decode(raw)
        neutral = value is None or any(value == one and type(value) in _kinds(one) for one in NEUTRAL[name])
    except (msgspec.ValidationError, RecursionError):  # a number out of range; something deep
        neutral = False
    if not neutral:
        allowed = " or ".join(["null", *(msgspec.json.encode(one).decode() for one in NEUTRAL[name])])
        message = f"{name} is not supported by this server: leave it out or send {allowed}"
        raise ApiError(400, message, name, code="unsupported_parameter")


def _kinds(value: object) -> tuple[type, ...]:
    """The types that may stand for a value: 0 may come as 0.0, but not as false, which Python holds equal."""
    return (int, float) if type(value) is int else (type(value),)


def _invalid(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    if missing := re.search(r"missing required field `(\w+)`", text):
        return ApiError(400, f"{missing[1]} is required", missing[1], code="missing_required_parameter")
    what, _, path = text.partition(" - at `$")
    if unknown := re.search(r"unknown field `(.{0,100})", what):
        what = "this field is unknown"
        path = f"{path.rstrip('`')}.{unknown[1].rstrip('`')}"
    param = path.rstrip("`").lstrip(".")[:100] or None
    return ApiError(400, f"{param or 'the body'}: {what[0].lower()}{what[1:]}", param)
