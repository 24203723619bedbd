"""`POST /v1/chat/completions`: a call checked and prepared for the engine, and its answer rendered."""

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.link.admission import Deadlines
from orca_jax.openai.answer import DONE, KEEP_ALIVE, error_event
from orca_jax.openai.conversation import (
    ToolRules,
    answer_form,
    render_conversation,
    share_of_tools,
    tool_rules,
    unread_fields,
)
from orca_jax.openai.errors import ApiError, PromptTooLong
from orca_jax.openai.generation import Job, Piece, whole_parts
from orca_jax.openai.logprobs import chat_logprobs, prompt_logprobs
from orca_jax.openai.model import Prompt, Service
from orca_jax.openai.params import check_fields, cut_limit, engine_requests, reading, room_of, truncated
from orca_jax.openai.schema.answers import (
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
from orca_jax.openai.schema.chat import ChatRequest, content_text
from orca_jax.request import TokenLogprobs
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.text.tools import ToolCall

ENDPOINT = "/v1/chat/completions"
_encode = msgspec.json.Encoder().encode


async def prepare(service: Service, call: ChatRequest, name: str, caller: str | None = None) -> Job:
    """Check a call and build its engine requests, so that the engine accepts all of the call or nothing.

    `name` appears in logs. `caller` identifies the API key of the call, None without keys.

    Raises:
        ApiError: a field is wrong.
    """
    check_call(service, call)
    rules = tool_rules(call, service)
    prompt, text = await _fitting_prompt(service, call, rules)
    form = await reading(call, lambda: answer_form(service, call, rules, text))
    requests = await engine_requests(
        service,
        call,
        [prompt],
        call.n or 1,
        caller,
        logprobs=(call.top_logprobs or 0) if call.logprobs else None,
        prompt_logprobs=call.prompt_logprobs,
        structured=form.structured,
    )
    return Job(
        id=f"chatcmpl-{call.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.adapter_of(call.model) or service.names[0],
        endpoint=ENDPOINT,
        name=call.request_id or name,
        prompts=[prompt],
        candidates=call.n or 1,
        requests=requests,
        deadlines=Deadlines(call.queue_timeout, call.timeout),
        stops=call.stops(),
        include_stop=bool(call.include_stop_str_in_output),
        skip_special_tokens=call.skip_special_tokens is not False and not form.shows_special_tokens,
        keeps_ids=bool(call.logprobs or call.return_token_ids) or call.prompt_logprobs is not None,
        make_parser=form.make_parser,
        has_reasoning=form.has_reasoning,
        parallel_calls=call.parallel_tool_calls is not False,
        has_short_call_ids=service.model.tool_call_parser == "mistral",
        renamed=_renamed(call),
        ignored=(*unread_fields(service, call), *rules.ignored, *form.ignored),
        left_out=form.left_out,
        cut_limit=cut_limit(call, requests),
    )


async def prompt_of(service: Service, call: ChatRequest, rules: ToolRules) -> Prompt:
    """The prompt of a call, of any length. Raises ApiError."""
    text = await render_conversation(service, call.messages, rules.shown, call)
    return Prompt(text, await service.encode(text, "messages", bool(call.add_special_tokens)))


async def _fitting_prompt(service: Service, call: ChatRequest, rules: ToolRules) -> tuple[Prompt, str]:
    """The prompt, truncated if the call asks for it, and its whole text.

    A refusal for its length says how much of it is tools.
    """
    try:
        whole = await prompt_of(service, call, rules)
        prompt = truncated(whole, call, service.model.context)
        room_of(service.model, len(prompt.ids), call)
    except PromptTooLong as error:
        if rules.shown:
            share = await share_of_tools(service, call, rules.shown)
            error.add_remark(f"{share}: send fewer of them, or shorter descriptions")
        raise
    assert whole.text is not None, "a template renders a text"
    return prompt, whole.text


def check_call(service: Service, call: ChatRequest) -> None:
    """Check the fields beside messages and tools, also of a call that does not generate. Raises ApiError."""
    check_fields(service, call, ("top_logprobs", "prompt_logprobs"))
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(call, name) == 0:
            raise ApiError(400, f"{name} must be at least 1, or -1 for the rest of the context", name)
    if call.top_logprobs and not call.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens mean the same; send only one of them", "max_tokens")
    if call.echo and not call.continue_final_message:
        raise ApiError(400, "echo requires continue_final_message: otherwise there is no text to repeat", "echo")


def _renamed(call: ChatRequest) -> dict[str, str]:
    """Parameter name of the engine -> field name in the call."""
    renamed = {"logprobs": "top_logprobs", "prompt": "messages", "max_tokens": call.limit_name}
    if call.structured_outputs is None:
        renamed["structured_outputs"] = "tools" if call.response_format is None else "response_format"
    return renamed


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
        self._echoed = content_text(call.messages[-1].content) if call.echo else ""
        is_object = {"object": "chat.completion.chunk", "created": job.created, "model": job.model}
        self._head = b"data: " + _encode({"id": job.id, **is_object})[:-1] + b',"choices":['
        self._has_usage = call.stream_options is not None and bool(call.stream_options.include_usage)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event, or several if the choice begins, ends or makes tool calls."""
        tail = self._tail if usage is None else _usage_tail(usage)
        index = piece.choice
        events = b"" if index in self._num_calls else self._begin(index, usage)
        if usage is not None:
            self._num_shown = usage.completion_tokens
        if self._job.keeps_ids:
            events += self._detailed(piece, tail)
        elif piece.text and not (self._job.has_reasoning and piece.reasoning()):
            # Formatted by hand, since almost every token of a stream takes this path.
            events += b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                index,
                _encode(piece.text),
                tail,
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
        return (self._head + _usage_tail(usage) if self._has_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event of the error, without `[DONE]`."""
        return error_event(error)

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer, with all choices."""
        job, call, prompt = self._job, self._call, self._job.prompts[0]
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
            prompt_token_ids=prompt.ids if call.return_token_ids else UNSET,
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
        message = AnswerMessage(None if calls and not text else text, calls or UNSET, thought, thought)
        assert whole.reason is not None, "a call is answered when all choices have ended"
        logprobs = self._logprobs(whole.ids, whole.logprobs)
        ids = list(whole.ids) if self._call.return_token_ids else UNSET
        return ChatChoice(whole.choice, message, logprobs, whole.reason, token_ids=ids)

    def _begin(self, index: int, usage: Usage | None) -> bytes:
        tail = self._tail
        if usage is not None:  # nothing of this choice has been sent
            total = usage.prompt_tokens + self._num_shown
            before = msgspec.structs.replace(usage, completion_tokens=self._num_shown, total_tokens=total)
            tail = _usage_tail(before)
        self._num_calls[index] = 0
        head = self._head
        if self._call.return_token_ids and len(self._num_calls) == 1:
            ids = _encode(self._job.prompts[0].ids)
            head = head.removesuffix(b'"choices":[') + b'"prompt_token_ids":' + ids + b',"choices":['
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
            token_ids=list(piece.ids) if self._call.return_token_ids else UNSET,
        )
        return self._event(choice, tail)

    def _calls(self, piece: Piece, tail: bytes) -> bytes:
        """An event for each call, or each piece of one."""
        events = b""
        for call in piece.calls():
            if call.name is None:
                part = ToolCallDelta(self._num_calls[piece.choice] - 1, FunctionDelta(call.arguments))
            else:
                name, number = call_id(self._job), self._num_calls[piece.choice]
                part = ToolCallDelta(number, FunctionDelta(call.arguments, call.name), name, "function")
                self._num_calls[piece.choice] += 1
            events += self._event(ChatChunkChoice(piece.choice, Delta(tool_calls=[part])), tail)
        return events

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._call.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(self._tokenizer, self._call.top_logprobs or 0, ids, logprobs))

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
    return name[:9] if job.has_short_call_ids else f"call_{name[:24]}"
