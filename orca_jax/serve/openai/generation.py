"""The path of a call through the engine, from engine requests to pieces of text, for completions and chats.

This code runs for every token of every stream, so the usual case is cheap: one tuple for each piece, no other object.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.link.admission import Deadlines
from orca_jax.link.client import OpenCall
from orca_jax.link.errors import LinkError, TimedOut
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai.asked import Prompt
from orca_jax.serve.openai.errors import ApiError, api_error, named
from orca_jax.serve.openai.explain import Seen
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema.answers import (
    AnswerReason,
    CacheExplanation,
    CompletionDetails,
    PromptDetails,
    Usage,
)
from orca_jax.serve.telemetry.observer import RequestRecord
from orca_jax.text.calls.harmony import HarmonyParser
from orca_jax.text.calls.parts import OutputPart, Reasoning, ToolCall, ToolParser
from orca_jax.text.reasoning import ReasoningParser
from orca_jax.text.stream import OutputStream
from orca_jax.values.request import FinishReason, RequestUpdate, TokenLogprobs
from orca_jax.values.step import NOT_FINITE

# without an update, until a stream sends a comment, so that proxies keep it open
QUIET_SECONDS = 5.0


type Receive = Callable[[], Awaitable[Mapping[str, Any]]]
"""ASGI's `receive` of a call whose body has been read; it returns when the client disconnects."""


class ClientGone(Exception):
    """The client has disconnected, so no answer can be sent."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prepared call: `candidates` engine requests for each prompt, in the order of the prompts."""

    id: str  # of the answer
    created: int  # seconds since 1970
    model: str
    endpoint: str
    name: str  # in logs and traces
    prompts: Sequence[Prompt]
    candidates: int
    requests: Sequence[Submit]
    deadlines: Deadlines
    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    keeps_ids: bool = False  # pieces carry ids and log probabilities
    scores_only: bool = False  # only the log probabilities of the prompt are returned
    make_parser: Callable[[], ToolParser] | None = None
    has_reasoning: bool = False  # the parser reads it apart, so usage has the number of its tokens
    parallel_calls: bool = True
    # nine characters, the only ids that Mistral's templates accept
    has_short_call_ids: bool = False
    paths: Mapping[str, str] = field(
        default_factory=dict
    )  # of the engine's parameters, if different
    names: Mapping[str, str] = field(default_factory=dict)  # of the API, for paths
    ignored: Sequence[str] = ()  # fields without effect on this model
    left_out: Sequence[str] = ()  # paths in schemas of the call that are not enforced
    # of generated tokens, if that of the call is larger than the rest of the context
    cut_limit: int | None = None
    seen: Seen | None = None  # beside earlier prompts; None without explanations


class Piece(NamedTuple):
    """A piece of one choice."""

    choice: int
    text: str  # of the answer, without reasoning and calls
    reason: AnswerReason | None = None
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    # text, reasoning and calls in their order; empty if there is text alone
    parts: Sequence[OutputPart] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    stop: str | None = None  # the stop string at the end
    num_reasoning: int = 0  # of `ids` up to the end of the reasoning

    def in_order(self) -> Sequence[OutputPart]:
        """The parts, also of a piece that has text alone."""
        return self.parts or ((self.text,) if self.text else ())

    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])

    def calls(self) -> list[ToolCall]:
        """The calls, and the pieces of calls."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one piece."""
    if len(pieces) == 1:
        return pieces[0]
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    parts: list[OutputPart] = []
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    num_reasoning = 0
    has_parts = False
    for piece in pieces:
        if piece.num_reasoning:
            num_reasoning = len(ids) + piece.num_reasoning
        if piece.parts:
            has_parts = True
        if prompt_logprobs is None:
            prompt_logprobs = piece.prompt_logprobs
        ids += piece.ids
        logprobs += piece.logprobs
        parts += piece.in_order()
    last = pieces[-1]
    return Piece(
        last.choice,
        "".join([piece.text for piece in pieces]),
        last.reason,
        ids,
        logprobs,
        parts if has_parts else (),
        prompt_logprobs,
        last.stop,
        num_reasoning,
    )


def whole_parts(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The parts of a choice, with neighbouring pieces of one kind and of one call joined."""
    if len(parts) < 2:
        return list(parts)
    runs: list[tuple[OutputPart, list[str]]] = []  # the first part of each, and the texts of all
    for part in parts:
        is_new = not runs or type(runs[-1][0]) is not type(part)
        if is_new or (isinstance(part, ToolCall) and part.name is not None):
            runs.append((part, []))
        runs[-1][1].append(_text_of(part))
    return [_with_text(first, "".join(texts)) for first, texts in runs]


def _text_of(part: OutputPart) -> str:
    match part:
        case ToolCall():
            return part.arguments
        case Reasoning():
            return part.text
    return part


def _with_text(part: OutputPart, text: str) -> OutputPart:
    """The same part with another text."""
    match part:
        case ToolCall(name):
            return ToolCall(name, text)
        case Reasoning():
            return Reasoning(text)
    return text


class OpenChoice:
    """A choice that is being generated: turns the updates of one engine request into pieces."""

    __slots__ = ("_job", "_num_calls", "_parser", "index", "num_reasoning", "output", "record")

    def __init__(self, index: int, job: Job, output: OutputStream, record: RequestRecord) -> None:
        self.index = index
        self.output = output
        self.record = record
        self._job = job
        self._parser: ToolParser | None = None
        if job.make_parser is not None:
            self._parser = job.make_parser()
        self._num_calls = 0
        self.num_reasoning = 0  # tokens up to the end of the reasoning

    def take_update(self, update: RequestUpdate) -> Piece | None:
        """The piece made from an update; None if no text is final yet."""
        if self._job.scores_only:
            return Piece(self.index, "", "length", prompt_logprobs=update.prompt_logprobs)
        output = self.output
        before = output.num_tokens
        parts: Sequence[OutputPart] = ()
        if self._parser is None:
            text = output.push(update.new_ids, update.finish_reason)
        else:
            parts = self._read(self._parser, update)
            text = "".join([part for part in parts if isinstance(part, str)])
        reason: AnswerReason | None = output.finish_reason  # type: ignore[assignment]  # "abort" and "error" never get here
        if reason == "stop" and self._num_calls:
            reason = "tool_calls"
        if self._job.keeps_ids:
            count = output.num_tokens - before
            ids = update.new_ids[:count]
            logprobs = update.logprobs[:count]
            thought = max(0, self.num_reasoning - before)
            return Piece(
                self.index,
                text,
                reason,
                ids,
                logprobs,
                parts,
                update.prompt_logprobs,
                output.stop,
                thought,
            )
        if reason is not None:
            return Piece(self.index, text, reason, parts=parts, stop=output.stop)
        if text or parts:
            return Piece(self.index, text, parts=parts)
        return None

    def _read(self, parser: ToolParser, update: RequestUpdate) -> list[OutputPart]:
        """The parts made from an update. Tokens of reasoning are read, and counted, one by one."""
        if not isinstance(parser, ReasoningParser | HarmonyParser) or not parser.is_open:
            return self._parse(parser, update.new_ids, update.finish_reason)
        parts: list[OutputPart] = []
        ids = update.new_ids
        while True:
            is_last = len(ids) <= 1 or not parser.is_open
            was_inside = parser.is_inside
            if is_last:
                parts += self._parse(parser, ids, update.finish_reason)
            else:
                parts += self._parse(parser, ids[:1], None)
            if was_inside or parser.is_inside:
                self.num_reasoning = self.output.num_tokens
            if is_last or self.output.finish_reason is not None:
                return whole_parts(parts)
            ids = ids[1:]

    def _parse(
        self, parser: ToolParser, ids: Sequence[int], finish_reason: FinishReason | None
    ) -> list[OutputPart]:
        text = self.output.push(ids, finish_reason)
        parts: list[OutputPart] = []
        if text:
            parts += parser.push(text)
        if self.output.finish_reason is not None:
            parts += parser.finish()
        if len(parts) == 1 and isinstance(parts[0], str):  # the usual case
            return parts
        kept: list[OutputPart] = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._num_calls += part.name is not None
                if self._num_calls > 1 and not self._job.parallel_calls:
                    continue
            kept.append(part)
        return kept


class Generation:
    """One running call."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self._client = service.client
        self._observer = service.observer
        self.has_versions = service.config.admin_key_file is not None
        self._overload_status = service.config.overload_status
        tokenizer = service.model.tokenizer
        self._outputs = [
            OutputStream(
                tokenizer,
                job.stops,
                include_stop=job.include_stop,
                skip_special_tokens=job.skip_special_tokens,
                min_tokens=request.params.min_tokens,
            )
            for request in job.requests
        ]
        self._open: dict[str, OpenChoice] = {}  # by the id of the engine's request
        # cached tokens of each prompt, as its first candidate reported
        self._cached = [0 for _ in job.prompts]
        # tokens of each prompt that its candidates wrote into the cache
        self._written = [0 for _ in job.prompts]
        self._reasoning = [0 for _ in job.requests]  # tokens of the reasoning of each choice
        self.weight_version: int | None = None  # of the weights; None before the first update
        # generated tokens of each choice, up to its last piece
        self._shown = [0 for _ in job.requests]

    async def pieces(self, receive: Receive) -> AsyncGenerator[list[Piece]]:
        """Run the call to its end. Yields the pieces that arrive together.

        Yields an empty list each time `QUIET_SECONDS` pass without an update: before the first one, or later while the
        requests are preempted or the engine is slow. Closing the generator early aborts the rest of the call.

        Raises:
            ApiError: the engine refused the call or failed, or a deadline passed.
            ClientGone: the client has disconnected.
        """
        job = self.job
        # around the whole call, and no context manager: its frames would keep the error and the
        # call alive
        try:
            async with (
                self._client.open(job.requests, job.deadlines, QUIET_SECONDS) as call,
                watching(receive, call),
                contextlib.aclosing(self._running(call)) as batches,
            ):
                async for pieces in batches:
                    yield pieces
        except LinkError as error:
            raise api_error(error, self._overload_status) from None

    async def _running(self, call: OpenCall) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of an open call. See `pieces`."""
        self._begin()
        try:
            while not (messages := await call.receive()):
                yield []
            self.weight_version = call.weight_version
            while True:
                pieces, failed = self._collect(call, messages)
                if pieces:  # also the pieces before a failure
                    yield pieces
                if failed is not None:
                    raise self._failure(failed)
                if not self._open:
                    return
                while not (messages := await call.receive()):
                    yield []
        except BaseException as error:
            self._end_all(end_reason(error))
            raise

    def usage(self) -> Usage:
        """Token counts so far."""
        prompt = sum(len(prompt.ids) for prompt in self.job.prompts)
        generated = sum(output.num_tokens for output in self._outputs)
        details: PromptDetails | UnsetType = UNSET
        if any(self._cached) or any(self._written):
            details = PromptDetails(sum(self._cached), sum(self._written))
        thought: CompletionDetails | UnsetType = UNSET
        if self.job.has_reasoning:
            thought = CompletionDetails(sum(self._reasoning))
        explanation: CacheExplanation | UnsetType = UNSET
        if self.job.seen is not None:
            explanation = self.job.seen.explanation()
        return Usage(prompt, generated, prompt + generated, details, thought, explanation)

    def running_usage(self, piece: Piece) -> Usage:
        """Token counts up to a piece: without tokens whose text is held back, or follows in the next piece."""
        self._shown[piece.choice] = self._outputs[piece.choice].num_tokens
        usage = self.usage()
        generated = sum(self._shown)
        return msgspec.structs.replace(
            usage, completion_tokens=generated, total_tokens=usage.prompt_tokens + generated
        )

    def _begin(self) -> None:
        job = self.job
        for index, request in enumerate(job.requests):
            name = job.name if len(job.requests) == 1 else f"{job.name}-{index}"
            record = self._observer.begin(name, job.endpoint, len(request.prompt_ids))
            self._open[request.request_id] = OpenChoice(index, job, self._outputs[index], record)

    def _collect(
        self, call: OpenCall, messages: Sequence[RequestUpdate | Rejected]
    ) -> tuple[list[Piece], RequestUpdate | Rejected | None]:
        """One piece for each choice with new output, and the first message of a failure."""
        pieces: dict[str, list[Piece]] = {}
        for message in messages:
            request_id = message.request_id
            choice = self._open.get(request_id)
            if choice is None:
                continue  # ended by a stop string; this update was already under way
            if isinstance(message, Rejected) or message.finish_reason in ("abort", "error"):
                return [joined(found) for found in pieces.values()], message
            self._count(choice, message)
            choice.record.take_update(message)
            piece = choice.take_update(message)
            if choice.num_reasoning:
                self._reasoning[choice.index] = choice.num_reasoning
            if piece is None:
                continue
            if piece.reason is not None:
                del self._open[request_id]
                choice.record.end(piece.reason)
                if message.finish_reason is None:
                    call.abort(request_id)
            pieces.setdefault(request_id, []).append(piece)
        return [joined(found) for found in pieces.values()], None

    def _count(self, choice: OpenChoice, message: RequestUpdate) -> None:
        """Take the use of the cache from an update."""
        if self.job.seen is not None:
            self.job.seen.take_update(message)
        number = choice.index // self.job.candidates
        if message.num_cached and choice.index % self.job.candidates == 0:
            self._cached[number] = message.num_cached
        if message.num_written:
            self._written[number] += message.num_written

    def _failure(self, failed: RequestUpdate | Rejected) -> ApiError:
        return self._rejection(failed) if isinstance(failed, Rejected) else failure_of(failed.error)

    def _rejection(self, rejected: Rejected) -> ApiError:
        param = rejected.param
        if param is not None:
            param = named(self.job.paths.get(param, param), self.job.names)
        message = rejected.message
        if param is not None and param not in message:
            message = f"{param}: {message}"
        return ApiError(400, message, param)

    def _end_all(self, reason: str) -> None:
        for choice in self._open.values():
            choice.record.end(reason)


def failure_of(reason: str | None) -> ApiError:
    """The error of a request that failed with `reason`, or was aborted."""
    if reason is None or reason == NOT_FINITE:
        return ApiError(500, reason or "the request was aborted", code="generation_failed")
    # the constraints of the call allow no token
    return ApiError(400, reason, code="no_token_allowed")


def end_reason(error: BaseException) -> str:
    """The reason of the end in metrics and logs."""
    if isinstance(error, ClientGone | GeneratorExit | asyncio.CancelledError):
        return "abort"
    if isinstance(error, TimedOut) and error.code != "client_too_slow":
        return "timeout"
    return "error"


@contextlib.asynccontextmanager
async def watching(receive: Receive, call: OpenCall) -> AsyncIterator[None]:
    """Fail the call when the client disconnects. The request body must have been read."""

    async def wait_for_the_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.fail(ClientGone())

    watcher = asyncio.create_task(wait_for_the_end())
    try:
        yield
    finally:
        watcher.cancel()
