"""The path of a call through the engine, from engine requests to pieces of text, for completions and chats.

This code runs for every token of every stream, so the usual case is cheap: one tuple for each piece, no other object.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from orca_jax.link.admission import Deadlines
from orca_jax.link.client import OpenCall
from orca_jax.link.errors import LinkError, TimedOut
from orca_jax.link.wire import Rejected, Submit
from orca_jax.openai.errors import ApiError, api_error
from orca_jax.openai.model import Prompt, Service
from orca_jax.openai.schema.answers import AnswerReason, CompletionDetails, PromptDetails, Usage
from orca_jax.request import FinishReason, RequestUpdate, TokenLogprobs
from orca_jax.step import NOT_FINITE
from orca_jax.telemetry.observer import RequestRecord
from orca_jax.text.calls.harmony import HarmonyParser
from orca_jax.text.reasoning import ReasoningParser
from orca_jax.text.stream import OutputStream
from orca_jax.text.tools import OutputPart, Reasoning, ToolCall, ToolParser

QUIET_SECONDS = 5.0  # without an update, until a stream begins with a comment, so that proxies keep it open


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
    has_short_call_ids: bool = False  # nine characters, the only ids that Mistral's templates accept
    renamed: dict[str, str] | None = None  # parameter name of the engine -> field name in the call, if different
    ignored: Sequence[str] = ()  # fields without effect on this model
    left_out: Sequence[str] = ()  # paths in schemas of the call that are not enforced
    cut_limit: int | None = None  # of generated tokens, if that of the call is larger than the rest of the context


class Piece(NamedTuple):
    """A piece of one choice."""

    choice: int
    text: str  # of the answer, without reasoning and calls
    reason: AnswerReason | None = None
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    parts: Sequence[OutputPart] = ()  # text, reasoning and calls in their order; empty if there is text alone
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
    num_reasoning, has_parts = 0, False
    for piece in pieces:
        if piece.num_reasoning:
            num_reasoning = len(ids) + piece.num_reasoning
        if piece.parts:
            has_parts = True
        ids += piece.ids
    return Piece(
        pieces[-1].choice,
        "".join([piece.text for piece in pieces]),
        pieces[-1].reason,
        ids,
        [one for piece in pieces for one in piece.logprobs],
        [part for piece in pieces for part in piece.in_order()] if has_parts else (),
        next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        pieces[-1].stop,
        num_reasoning,
    )


def whole_parts(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The parts of a choice, with neighbouring pieces of one kind and of one call joined."""
    whole: list[OutputPart] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, str) and isinstance(last, str):
            whole[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolCall) and part.name is None and isinstance(last, ToolCall):
            whole[-1] = ToolCall(last.name, last.arguments + part.arguments)
        else:
            whole.append(part)
    return whole


class OpenChoice:
    """A choice that is being generated: turns the updates of one engine request into pieces."""

    __slots__ = ("_job", "_num_calls", "_parser", "index", "num_reasoning", "output", "record")

    def __init__(self, index: int, job: Job, output: OutputStream, record: RequestRecord) -> None:
        self.index = index
        self.output = output
        self.record = record
        self._job = job
        self._parser = None if job.make_parser is None else job.make_parser()
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
            ids, logprobs = update.new_ids[:count], update.logprobs[:count]
            thought = max(0, self.num_reasoning - before)
            return Piece(self.index, text, reason, ids, logprobs, parts, update.prompt_logprobs, output.stop, thought)
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
            parts += self._parse(parser, ids if is_last else ids[:1], update.finish_reason if is_last else None)
            if was_inside or parser.is_inside:
                self.num_reasoning = self.output.num_tokens
            if is_last or self.output.finish_reason is not None:
                return whole_parts(parts)
            ids = ids[1:]

    def _parse(self, parser: ToolParser, ids: Sequence[int], finish_reason: FinishReason | None) -> list[OutputPart]:
        text = self.output.push(ids, finish_reason)
        parts = list(parser.push(text)) if text else []
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
        self._cached = [0 for _ in job.prompts]  # cached tokens of each prompt, as its first candidate reported
        self._reasoning = [0 for _ in job.requests]  # tokens of the reasoning of each choice
        self.weight_version: int | None = None  # of the weights; None before the first update
        self._shown = [0 for _ in job.requests]  # generated tokens of each choice, up to its last piece

    async def pieces(self, receive: Receive) -> AsyncGenerator[list[Piece]]:
        """Run the call to its end. Yields the pieces that arrive together.

        Yields an empty list each time `QUIET_SECONDS` pass before the first update. Closing the generator early aborts
        the rest of the call.

        Raises:
            ApiError: the engine refused the call or failed, or a deadline passed.
            ClientGone: the client has disconnected.
        """
        job = self.job
        try:  # around the whole call, and no context manager: its frames would keep the error and the call alive
            async with self._client.open(job.requests, job.deadlines) as call, watching(receive, call):
                self._begin()
                try:
                    while (messages := await _receive_soon(call)) is None:
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
                        messages = await call.receive()
                except BaseException as error:
                    self._end_all(end_reason(error))
                    raise
        except LinkError as error:
            raise api_error(error, self._overload_status) from None

    def usage(self) -> Usage:
        """Token counts so far."""
        prompt = sum(len(prompt.ids) for prompt in self.job.prompts)
        generated = sum(output.num_tokens for output in self._outputs)
        details = PromptDetails(sum(self._cached)) if any(self._cached) else UNSET
        thought = CompletionDetails(sum(self._reasoning)) if self.job.has_reasoning else UNSET
        return Usage(prompt, generated, prompt + generated, details, thought)

    def running_usage(self, piece: Piece) -> Usage:
        """Token counts up to a piece: without tokens whose text is held back, or follows in the next piece."""
        self._shown[piece.choice] = self._outputs[piece.choice].num_tokens
        usage, generated = self.usage(), sum(self._shown)
        return msgspec.structs.replace(usage, completion_tokens=generated, total_tokens=usage.prompt_tokens + generated)

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
            if message.num_cached and choice.index % self.job.candidates == 0:
                self._cached[choice.index // self.job.candidates] = message.num_cached
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

    def _failure(self, failed: RequestUpdate | Rejected) -> ApiError:
        return self._rejection(failed) if isinstance(failed, Rejected) else failure_of(failed.error)

    def _rejection(self, rejected: Rejected) -> ApiError:
        param = rejected.param
        if param is not None and self.job.renamed is not None:
            param = self.job.renamed.get(param, param)
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
    return ApiError(400, reason, code="no_token_allowed")  # the constraints of the call allow no token


def end_reason(error: BaseException) -> str:
    """The reason of the end in metrics and logs."""
    if isinstance(error, TimedOut):
        return "error" if error.code == "client_too_slow" else "timeout"
    return "abort" if isinstance(error, ClientGone | GeneratorExit | asyncio.CancelledError) else "error"


async def _receive_soon(call: OpenCall) -> list[RequestUpdate | Rejected] | None:
    """The next messages, or None after `QUIET_SECONDS` without one."""
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            return await call.receive()
    except TimeoutError:
        return None


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
