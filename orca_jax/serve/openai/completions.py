"""`POST /v1/completions`: a call checked and prepared for the engine, and its answer rendered."""

import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai import preparation
from orca_jax.serve.openai.answer import DONE, KEEP_ALIVE, error_event
from orca_jax.serve.openai.asked import Asked, Limits, Prompt
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Job, Piece
from orca_jax.serve.openai.logprobs import CompletionLogprobsWriter, prompt_logprobs
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import check_ids, prompt_parts, stop_strings, truncated
from orca_jax.serve.openai.schema.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from orca_jax.serve.openai.schema.limits import DEFAULT_MAX_TOKENS, MAX_ANSWERS
from orca_jax.serve.openai.schema.sampling import CompletionRequest, PromptPart
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.request import TokenLogprobs

ENDPOINT = "/v1/completions"
_encode = msgspec.json.Encoder().encode


async def prepare(
    service: Service, call: CompletionRequest, name: str, caller: str | None = None
) -> Job:
    """Check a call and build its engine requests. See `preparation.prepare`. Raises ApiError."""
    return await preparation.prepare(service, await understood(service, call), name, caller)


async def understood(service: Service, call: CompletionRequest) -> Asked:
    """What a call asks for. Its prompts are encoded. Raises ApiError."""
    if call.max_tokens == 0 and not call.echo:
        raise ApiError(
            400,
            "max_tokens must be at least 1, -1 for the rest of the context, or 0 with echo to score the prompt",
            "max_tokens",
        )
    limits = Limits(call.max_tokens, DEFAULT_MAX_TOKENS, call.truncate_prompt_tokens)
    parts = prompt_parts(call.prompt, "prompt")
    candidates = _candidates(call, len(parts))
    adds_special_tokens = call.add_special_tokens is not False
    prompts = await _prompts(service, parts, limits, adds_special_tokens=adds_special_tokens)
    logprobs = call.logprobs
    if logprobs is None and candidates > (call.n or 1):
        logprobs = 0  # for the order of the answers
    prompt_logprobs = call.prompt_logprobs
    if call.echo and call.logprobs is not None:
        prompt_logprobs = max(call.logprobs, prompt_logprobs or 0)
    return Asked(
        id=f"cmpl-{call.request_id or uuid.uuid4().hex}",
        endpoint=ENDPOINT,
        names={},
        fields=call,
        prompt=prompts,
        form=call.response_format,
        limits=limits,
        stops=stop_strings(call.stop),
        candidates=candidates,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        keeps_ids=bool(call.return_token_ids),
        scores_only=call.max_tokens == 0,
    )


def _candidates(call: CompletionRequest, num_prompts: int) -> int:
    """Number of engine requests for each prompt. Raises ApiError."""
    n = call.n or 1
    candidates = call.best_of or n
    if candidates < n:
        raise ApiError(400, f"best_of must be at least n, which is {n}", "best_of")
    if candidates > n and call.stream:
        raise ApiError(
            400,
            "best_of cannot be streamed: the best texts are known only at the end",
            "best_of",
        )
    if candidates * num_prompts > MAX_ANSWERS:
        message = (
            f"{num_prompts} prompts with {candidates} candidates each exceed the limit of "
            f"{MAX_ANSWERS} in one call"
        )
        raise ApiError(400, message, "best_of" if call.best_of else "n")
    return candidates


async def _prompts(
    service: Service,
    parts: Sequence[PromptPart],
    limits: Limits,
    *,
    adds_special_tokens: bool,
) -> list[Prompt]:
    """The prompts as token ids, truncated if the call asks for it. Parts are all texts or all lists of ids."""
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await service.encode_all(texts, "prompt", adds_special_tokens)
    prompts = [Prompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]
    prompts += [Prompt(None, part) for part in parts if not isinstance(part, str)]
    context = service.model.context
    prompts = [truncated(prompt, limits, context) for prompt in prompts]
    for prompt in prompts:
        # longer ones are refused later, for their length
        if prompt.text is None and len(prompt.ids) <= context:
            check_ids(service.model, prompt.ids, "prompt")
    return prompts


class CompletionRenderer:
    """Renders the answer to one call."""

    def __init__(self, tokenizer: Tokenizer, job: Job, call: CompletionRequest) -> None:
        self._job = job
        self._call = call
        self._tokenizer = tokenizer
        self._hidden = self._tokenizer.special_ids if job.skip_special_tokens else frozenset[int]()
        self._is_plain = not (call.echo or job.keeps_ids)
        self._begun: set[int] = set()
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        names = _encode(
            {"id": job.id, "object": "text_completion", "created": job.created, "model": job.model}
        )
        self._head = b"data: " + names[:-1] + b',"choices":['
        self._has_usage = call.stream_options is not None and bool(
            call.stream_options.include_usage
        )
        self._tail = b"]}\n\n"
        if self._has_usage:
            self._tail = b'],"usage":null}\n\n'

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event for the piece."""
        tail = self._tail
        if usage is not None:
            tail = b'],"usage":' + _encode(usage) + b"}\n\n"
        if not self._is_plain:
            return self._head + _encode(self._piece_choice(piece)) + tail
        reason = b"null" if piece.reason is None else b'"' + piece.reason.encode() + b'"'
        # Formatted by hand, since almost every token of a stream takes this path.
        return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}%b' % (
            self._head,
            piece.choice,
            _encode(piece.text),
            reason,
            tail,
        )

    def silence(self) -> bytes:
        """A comment, which clients skip."""
        return KEEP_ALIVE

    def end(self, usage: Usage) -> bytes:
        """The event with the token counts, without choices, if the call wants it, and `[DONE]`."""
        if not self._has_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event of the error, without `[DONE]`."""
        return error_event(error)

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer: the choices of each prompt in order, the best ones first."""
        n = self._call.n or 1
        candidates = self._job.candidates
        answered: list[CompletionChoice] = []
        for first in range(0, len(choices), candidates):
            best = choices[first : first + candidates]
            if candidates > n:
                best = sorted(best, key=_mean_logprob, reverse=True)[:n]
            for whole in best:
                answered.append(
                    self._whole_choice(len(answered), self._job.prompts[first // candidates], whole)
                )
        job = self._job
        return _encode(
            Completion(job.id, "text_completion", job.created, job.model, answered, usage)
        )

    def _piece_choice(self, piece: Piece) -> CompletionChoice:
        prompt = self._job.prompts[piece.choice // self._job.candidates]
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        writer = self._writers.get(piece.choice)
        if writer is None:
            writer = self._writers[piece.choice] = self._writer()
        return self._choice(piece.choice, prompt, piece, writer, is_first, UNSET)

    def _whole_choice(self, index: int, prompt: Prompt, whole: Piece) -> CompletionChoice:
        scores: PromptLogprobs | UnsetType = UNSET
        if self._call.prompt_logprobs is not None:
            logprobs = whole.prompt_logprobs or ()
            scores = prompt_logprobs(
                self._tokenizer, self._call.prompt_logprobs, prompt.ids, logprobs
            )
        return self._choice(index, prompt, whole, self._writer(), True, scores)

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
        text = piece.text
        if call.echo and is_first:
            text = self._echoed(prompt) + text
        prompt_ids: list[int] | UnsetType = UNSET
        ids: list[int] | UnsetType = UNSET
        if call.return_token_ids:
            ids = list(piece.ids)
            if is_first:
                prompt_ids = prompt.ids
        return CompletionChoice(
            index,
            text,
            self._logprobs(prompt, piece, writer, is_first),
            piece.reason,
            prompt_token_ids=prompt_ids,
            token_ids=ids,
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
        return writer.take_tokens(ids, logprobs)

    def _writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._tokenizer, self._call.logprobs or 0, self._hidden)


def _mean_logprob(choice: Piece) -> float:
    return sum(one.logprob for one in choice.logprobs) / max(1, len(choice.logprobs))
