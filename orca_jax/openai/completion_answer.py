"""Pieces and outcomes in OpenAI's shape of text completions."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.openai.answer import FinishedChoice
from orca_jax.openai.generation import Job, Piece
from orca_jax.openai.logprobs import CompletionLogprobsWriter, prompt_logprobs
from orca_jax.openai.model import Prompt
from orca_jax.openai.schema.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from orca_jax.openai.schema.completion import CompletionRequest
from orca_jax.request import TokenLogprobs
from orca_jax.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


class CompletionRenderer:
    """One call's texts."""

    def __init__(self, tokenizer: Tokenizer, job: Job, call: CompletionRequest) -> None:
        self._job = job
        self._call = call
        self._tokenizer = tokenizer
        self._hidden = self._tokenizer.special_ids if job.skip_special_tokens else frozenset[int]()
        self._is_plain = not (call.echo or job.keeps_ids)
        self._begun: set[int] = set()
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        names = _encode({"id": job.id, "object": "text_completion", "created": job.created, "model": job.model})
        self._head = b"data: " + names[:-1] + b',"choices":['
        wants_usage = call.stream_options is not None and bool(call.stream_options.include_usage)
        self._tail = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event."""
        tail = self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
        if not self._is_plain:
            return self._head + _encode(self._piece_choice(piece)) + tail
        reason = b"null" if piece.reason is None else b'"' + piece.reason.encode() + b'"'
        # By hand: this is what nearly every token of nearly every stream becomes.
        return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}%b' % (
            self._head,
            piece.choice,
            _encode(piece.text),
            reason,
            tail,
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """No choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def answer(self, outcomes: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The choices of each prompt in order, the best ones first."""
        n, candidates = self._call.n or 1, self._job.candidates
        choices: list[CompletionChoice] = []
        for first in range(0, len(outcomes), candidates):
            best = outcomes[first : first + candidates]
            if candidates > n:
                best = sorted(best, key=_mean_logprob, reverse=True)[:n]
            for outcome in best:
                choices.append(self._whole_choice(len(choices), self._job.prompts[first // candidates], outcome))
        job = self._job
        return _encode(Completion(job.id, "text_completion", job.created, job.model, choices, usage))

    def _piece_choice(self, piece: Piece) -> CompletionChoice:
        prompt = self._job.prompts[piece.choice // self._job.candidates]
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        writer = self._writers.get(piece.choice)
        if writer is None:
            writer = self._writers[piece.choice] = self._writer()
        return self._choice(piece.choice, prompt, piece, writer, is_first, UNSET)

    def _whole_choice(self, index: int, prompt: Prompt, outcome: FinishedChoice) -> CompletionChoice:
        piece = Piece(
            index, outcome.text, outcome.reason, outcome.ids, outcome.logprobs, (), outcome.prompt_logprobs or ()
        )
        scores: PromptLogprobs | UnsetType = UNSET
        if self._call.prompt_logprobs is not None:
            scores = prompt_logprobs(self._tokenizer, self._call.prompt_logprobs, prompt.ids, outcome.prompt_logprobs)
        return self._choice(index, prompt, piece, self._writer(), True, scores)

    def _choice(
        self,
        index: int,
        prompt: Prompt,
        piece: Piece,
        writer: CompletionLogprobsWriter,
        is_first: bool,
        scores: PromptLogprobs | UnsetType,
    ) -> CompletionChoice:
        call = self._call
        assert piece.reason != "tool_calls", "completions have no tools"
        return CompletionChoice(
            index,
            self._echoed(prompt) + piece.text if call.echo and is_first else piece.text,
            self._logprobs(prompt, piece, writer, is_first),
            piece.reason,
            prompt_token_ids=prompt.ids if call.return_token_ids and is_first else UNSET,
            token_ids=list(piece.ids) if call.return_token_ids else UNSET,
            prompt_logprobs=scores,
        )

    def _echoed(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, self._job.skip_special_tokens)

    def _logprobs(
        self, prompt: Prompt, piece: Piece, writer: CompletionLogprobsWriter, is_first: bool
    ) -> CompletionLogprobs | None:
        if self._call.logprobs is None:
            return None
        ids: list[int] = list(piece.ids)
        logprobs: list[TokenLogprobs | None] = list(piece.logprobs)
        if self._call.echo and is_first:
            ids = prompt.ids + ids
            logprobs = [None, *(piece.prompt_logprobs or ()), *logprobs]
        return writer.take(ids, logprobs)

    def _writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._tokenizer, self._call.logprobs or 0, self._hidden)


def _mean_logprob(outcome: FinishedChoice) -> float:
    return sum(one.logprob for one in outcome.logprobs) / max(1, len(outcome.logprobs))
