"""Pieces and outcomes in OpenAI's shape of chat completions."""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.openai.answer import FinishedChoice
from orca_jax.openai.generation import Job, Piece
from orca_jax.openai.logprobs import chat_logprobs, prompt_logprobs
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

_encode = msgspec.json.Encoder().encode


class ChatRenderer:
    """One call's answers. In a stream, each choice begins with a chunk that has the role and ends with one that has
    the reason and nothing else.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job, call: ChatRequest) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._call = call
        self._num_calls: dict[int, int] = {}  # of each choice that has begun
        self._echoed = content_text(call.messages[-1].content) if call.echo else ""
        is_object = {"object": "chat.completion.chunk", "created": job.created, "model": job.model}
        self._head = b"data: " + _encode({"id": job.id, **is_object})[:-1] + b',"choices":['
        wants_usage = call.stream_options is not None and bool(call.stream_options.include_usage)
        self._tail = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event, or several where the choice begins, ends or calls."""
        tail = self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
        index = piece.choice
        events = b"" if index in self._num_calls else self._begin(index, tail)
        if self._job.keeps_ids:
            events += self._detailed(piece, tail)
        elif piece.text and self._job.called is None:
            # By hand: this is what nearly every token of nearly every stream becomes.
            events += b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                index,
                _encode(piece.text),
                tail,
            )
        if piece.calls:
            events += self._calls(piece, tail)
        if piece.text and self._job.called is not None:
            events += self._arguments(self._job.called, piece, tail)
        if piece.reason is not None:
            events += self._event(ChatChunkChoice(index, Delta(), None, piece.reason), tail)
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        """No choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def answer(self, outcomes: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """All choices."""
        job, call, prompt = self._job, self._call, self._job.prompts[0]
        scores: PromptLogprobs | UnsetType = UNSET
        if call.prompt_logprobs is not None:
            logprobs = outcomes[0].prompt_logprobs
            scores = prompt_logprobs(self._tokenizer, call.prompt_logprobs, prompt.ids, logprobs)
        whole = ChatCompletion(
            job.id,
            job.created,
            job.model,
            [self._choice(index, outcome) for index, outcome in enumerate(outcomes)],
            usage,
            prompt_token_ids=prompt.ids if call.return_token_ids else UNSET,
            prompt_logprobs=scores,
        )
        return _encode(whole)

    def _choice(self, index: int, outcome: FinishedChoice) -> ChatChoice:
        text = self._echoed + outcome.text
        calls = [ToolCallAnswer(_call_id(), Function(*call)) for call in outcome.calls]
        message = AnswerMessage(None if calls and not text else text, calls or UNSET)
        assert outcome.reason is not None, "a call is answered when all choices have ended"
        logprobs = self._logprobs(outcome.ids, outcome.logprobs)
        ids = outcome.ids if self._call.return_token_ids else UNSET
        return ChatChoice(index, message, logprobs, outcome.reason, token_ids=ids)

    def _begin(self, index: int, tail: bytes) -> bytes:
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
        """The text with its ids and log probabilities; ids whose text is still held back come with an empty one."""
        if not (piece.text or piece.ids):
            return b""
        choice = ChatChunkChoice(
            piece.choice,
            Delta(content=piece.text if self._job.called is None else ""),
            self._logprobs(piece.ids, piece.logprobs),
            token_ids=list(piece.ids) if self._call.return_token_ids else UNSET,
        )
        return self._event(choice, tail)

    def _calls(self, piece: Piece, tail: bytes) -> bytes:
        first = self._num_calls[piece.choice]
        self._num_calls[piece.choice] += len(piece.calls)
        events = b""
        for number, call in enumerate(piece.calls, start=first):
            whole = ToolCallDelta(number, FunctionDelta(call.arguments, call.name), _call_id(), "function")
            events += self._event(ChatChunkChoice(piece.choice, Delta(tool_calls=[whole])), tail)
        return events

    def _arguments(self, name: str, piece: Piece, tail: bytes) -> bytes:
        """The only call of the choice begins, or goes on."""
        part = ToolCallDelta(0, FunctionDelta(piece.text))
        if not self._num_calls[piece.choice]:
            self._num_calls[piece.choice] = 1
            part = ToolCallDelta(0, FunctionDelta(piece.text, name), _call_id(), "function")
        return self._event(ChatChunkChoice(piece.choice, Delta(tool_calls=[part])), tail)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._call.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(self._tokenizer, self._call.top_logprobs or 0, ids, logprobs))

    def _event(self, choice: ChatChunkChoice, tail: bytes) -> bytes:
        return self._head + _encode(choice) + tail


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
