"""`POST /v1/chat/completions`: a call checked and prepared for the engine, and its answer rendered."""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai import preparation
from orca_jax.serve.openai.answer import DONE, KEEP_ALIVE, error_event
from orca_jax.serve.openai.asked import Asked, AskedTools, Limits, TemplatePrompt, TemplateTool
from orca_jax.serve.openai.conversation import (
    allowed_tools,
    content_text,
    named_choice,
    plain_messages,
    plain_tools,
)
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Job, Piece, whole_parts
from orca_jax.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import REASONING_FIELDS, stop_strings
from orca_jax.serve.openai.schema.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Function,
    FunctionDelta,
    PromptLogprobs,
    ToolCallAnswer,
    ToolCallDelta,
    Usage,
)
from orca_jax.serve.openai.schema.chat import AllowedTools, AssistantMessage, ChatRequest, NamedTool
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.text.tools import ToolCall
from orca_jax.values.request import TokenLogprobs

ENDPOINT = "/v1/chat/completions"
NAMES = {"logprobs": "top_logprobs"}
"""The names of a chat for paths."""
NEWER_NAMES = {**NAMES, "max_tokens": "max_completion_tokens"}
"""The same for a call with the newer name of its limit."""
_encode = msgspec.json.Encoder().encode


async def prepare(service: Service, call: ChatRequest, name: str, caller: str | None = None) -> Job:
    """Check a call and build its engine requests. See `preparation.prepare`. Raises ApiError."""
    asked = understood(call)
    return await preparation.prepare(service, asked, name, caller)


def understood(call: ChatRequest) -> Asked:
    """What a call asks for. Raises ApiError if its fields contradict each other."""
    _check(call)
    names = NAMES
    limit = call.max_tokens
    if call.max_completion_tokens is not None:
        names = NEWER_NAMES
        limit = call.max_completion_tokens
    messages = plain_messages(call.messages)
    tools = plain_tools(call.tools or ())
    return Asked(
        id=f"chatcmpl-{call.request_id or uuid.uuid4().hex}",
        endpoint=ENDPOINT,
        names=names,
        fields=call,
        prompt=TemplatePrompt(
            messages,
            hints=_hints(call),
            variables=call.chat_template_kwargs or {},
            thoughts=_thoughts(call),
            adds_prompt=call.add_generation_prompt is not False,
            is_continued=bool(call.continue_final_message),
        ),
        tools=_asked_tools(call, tools),
        form=call.response_format,
        limits=Limits(limit, kept=call.truncate_prompt_tokens),
        stops=stop_strings(call.stop),
        candidates=call.n or 1,
        logprobs=(call.top_logprobs or 0) if call.logprobs else None,
        prompt_logprobs=call.prompt_logprobs,
        keeps_ids=bool(call.return_token_ids),
    )


def _hints(call: ChatRequest) -> dict[str, object]:
    hints = {"reasoning_effort": call.reasoning_effort, "enable_thinking": call.enable_thinking}
    return {name: value for name, value in hints.items() if value is not None}


def _thoughts(call: ChatRequest) -> list[str]:
    """The names of the fields with reasoning of earlier answers."""
    answers = [message for message in call.messages if isinstance(message, AssistantMessage)]
    found: list[str] = []
    for name in REASONING_FIELDS:
        if any(getattr(one, name) for one in answers):
            found.append(f"messages.{name}")
    return found


def _asked_tools(call: ChatRequest, listed: list[TemplateTool]) -> AskedTools:
    are_parallel = call.parallel_tool_calls is not False
    match call.tool_choice:
        case AllowedTools(allowed):
            names = [tool.function.name for tool in allowed.tools]
            return AskedTools(allowed_tools(listed, names), allowed.mode, are_parallel)
        case NamedTool(function):
            return AskedTools(listed, named_choice(function.name), are_parallel)
        case "any":
            return AskedTools(listed, "required", are_parallel)
        case choice:
            return AskedTools(listed, choice, are_parallel)


def _check(call: ChatRequest) -> None:
    """Refuse fields that contradict each other. Raises ApiError."""
    limits = (call.max_tokens, call.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same; send only one of them",
            "max_tokens",
        )
    if call.top_logprobs and not call.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    if call.echo and not call.continue_final_message:
        raise ApiError(
            400,
            "echo requires continue_final_message: otherwise there is no text to repeat",
            "echo",
        )


class ChatRenderer:
    """Renders the answer to one call.

    In a stream, each choice begins with a chunk for the role and ends with a chunk for the finish reason alone.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job, call: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._call = call
        self._num_calls: dict[int, int] = {}  # by choice; a choice is added when its stream begins
        self._num_shown = 0  # generated tokens of all choices in the usage of the last chunk
        self._echoed = ""
        if call.echo:
            self._echoed = content_text(call.messages[-1].content)
        is_object = {"object": "chat.completion.chunk", "created": job.created, "model": job.model}
        self._head = b"data: " + _encode({"id": job.id, **is_object})[:-1] + b',"choices":['
        self._has_usage = call.stream_options is not None and bool(
            call.stream_options.include_usage
        )
        self._tail = b"]}\n\n"
        if self._has_usage:
            self._tail = b'],"usage":null}\n\n'

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event, or several if the choice begins, ends or makes tool calls."""
        index = piece.choice
        events = b""
        if index not in self._num_calls:
            events = self._begin(index, usage)
        tail = self._tail
        if usage is not None:
            tail = _usage_tail(usage)
            self._num_shown = usage.completion_tokens
        if self._job.keeps_ids:
            events += self._detailed(piece, tail)
        elif piece.text and not (self._job.has_reasoning and piece.reasoning()):
            # Formatted by hand, since almost every token of a stream takes this path.
            events += (
                b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b'
                % (
                    self._head,
                    index,
                    _encode(piece.text),
                    tail,
                )
            )
        elif self._job.has_reasoning and (delta := _said(piece)) is not None:
            events += self._event(ChatChunkChoice(index, delta), tail)
        if piece.parts:
            events += self._calls(piece, tail)
        if piece.reason is not None:
            events += self._event(ChatChunkChoice(index, Delta(), None, piece.reason), tail)
        return events

    def silence(self) -> bytes:
        """A comment, which clients skip."""
        return KEEP_ALIVE

    def end(self, usage: Usage) -> bytes:
        """The event with the token counts, without choices, if the call wants it, and `[DONE]`."""
        if not self._has_usage:
            return DONE
        return self._head + _usage_tail(usage) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event of the error, without `[DONE]`."""
        return error_event(error)

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer, with all choices."""
        job = self._job
        call = self._call
        prompt = self._job.prompts[0]
        scores: PromptLogprobs | UnsetType = UNSET
        if call.prompt_logprobs is not None:
            logprobs = choices[0].prompt_logprobs or ()
            scores = prompt_logprobs(self._tokenizer, call.prompt_logprobs, prompt.ids, logprobs)
        whole = ChatCompletion(
            job.id,
            job.created,
            job.model,
            [self._choice(choice) for choice in choices],
            usage,
            prompt_token_ids=self._shown_ids(prompt.ids),
            prompt_logprobs=scores,
        )
        return _encode(whole)

    def _choice(self, whole: Piece) -> ChatChoice:
        text = self._echoed + whole.text
        calls = [
            ToolCallAnswer(call_id(self._job), Function(call.name, call.arguments))
            for call in whole_parts(whole.calls())
            if isinstance(call, ToolCall) and call.name is not None
        ]
        thought = whole.reasoning() or UNSET
        message = AnswerMessage(
            None if calls and not text else text, calls or UNSET, thought, thought
        )
        assert whole.reason is not None, "a call is answered when all choices have ended"
        logprobs = self._logprobs(whole.ids, whole.logprobs)
        ids = self._shown_ids(whole.ids)
        return ChatChoice(whole.choice, message, logprobs, whole.reason, token_ids=ids)

    def _shown_ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        """The ids, if the call wants them."""
        if not self._call.return_token_ids:
            return UNSET
        return list(ids)

    def _begin(self, index: int, usage: Usage | None) -> bytes:
        tail = self._tail
        if usage is not None:  # nothing of this choice has been sent
            total = usage.prompt_tokens + self._num_shown
            before = msgspec.structs.replace(
                usage, completion_tokens=self._num_shown, total_tokens=total
            )
            tail = _usage_tail(before)
        self._num_calls[index] = 0
        head = self._head
        if self._call.return_token_ids and len(self._num_calls) == 1:
            ids = _encode(self._job.prompts[0].ids)
            head = (
                head.removesuffix(b'"choices":[') + b'"prompt_token_ids":' + ids + b',"choices":['
            )
        events = head + _encode(ChatChunkChoice(index, Delta(role="assistant", content=""))) + tail
        if self._echoed:
            events += self._event(ChatChunkChoice(index, Delta(content=self._echoed)), tail)
        return events

    def _detailed(self, piece: Piece, tail: bytes) -> bytes:
        """An event with ids and log probabilities. The text is empty while it is still held back."""
        if not (piece.text or piece.ids):
            return b""
        choice = ChatChunkChoice(
            piece.choice,
            _said(piece) or Delta(content=""),
            self._logprobs(piece.ids, piece.logprobs),
            token_ids=self._shown_ids(piece.ids),
        )
        return self._event(choice, tail)

    def _calls(self, piece: Piece, tail: bytes) -> bytes:
        """An event for each call, or each piece of one."""
        events = b""
        for call in piece.calls():
            if call.name is None:
                part = ToolCallDelta(
                    self._num_calls[piece.choice] - 1, FunctionDelta(call.arguments)
                )
            else:
                name = call_id(self._job)
                number = self._num_calls[piece.choice]
                part = ToolCallDelta(
                    number, FunctionDelta(call.arguments, call.name), name, "function"
                )
                self._num_calls[piece.choice] += 1
            events += self._event(ChatChunkChoice(piece.choice, Delta(tool_calls=[part])), tail)
        return events

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> ChatLogprobs | None:
        if not self._call.logprobs:
            return None
        return ChatLogprobs(
            chat_logprobs(self._tokenizer, self._call.top_logprobs or 0, ids, logprobs)
        )

    def _event(self, choice: ChatChunkChoice, tail: bytes) -> bytes:
        return self._head + _encode(choice) + tail


def _said(piece: Piece) -> Delta | None:
    """The text and the reasoning of a piece; None if it has neither."""
    thought = piece.reasoning() or UNSET
    if not piece.text and thought is UNSET:
        return None
    return Delta(content=piece.text or UNSET, reasoning=thought, reasoning_content=thought)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage) + b"}\n\n"


def call_id(job: Job) -> str:
    """A new id for a tool call."""
    name = uuid.uuid4().hex
    if job.has_short_call_ids:
        return name[:9]
    return f"call_{name[:24]}"
