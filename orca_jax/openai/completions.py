"""`POST /v1/completions`: a call checked and prepared for the engine, and its answer rendered."""

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.link.admission import Deadlines
from orca_jax.openai.answer import DONE, KEEP_ALIVE, error_event
from orca_jax.openai.errors import ApiError
from orca_jax.openai.generation import Job, Piece
from orca_jax.openai.logprobs import CompletionLogprobsWriter, prompt_logprobs
from orca_jax.openai.model import Prompt, Service
from orca_jax.openai.params import asked_form, check_fields, check_ids, cut_limit, engine_requests, reading, truncated
from orca_jax.openai.schema.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from orca_jax.openai.schema.sampling import CompletionRequest
from orca_jax.request import TokenLogprobs
from orca_jax.text.tokenizer import Tokenizer

ENDPOINT = "/v1/completions"
_encode = msgspec.json.Encoder().encode


async def prepare(service: Service, call: CompletionRequest, name: str, caller: str | None = None) -> Job:
    """Check a call and build its engine requests, so that the engine accepts all of the call or nothing.

    `name` appears in logs. `caller` identifies the API key of the call, None without keys.

    Raises:
        ApiError: a field is wrong.
    """
    check_fields(service, call, ("logprobs", "prompt_logprobs"))
    if call.max_tokens == 0 and not call.echo:
        raise ApiError(
            400,
            "max_tokens must be at least 1, -1 for the rest of the context, or 0 with echo to score the prompt",
            "max_tokens",
        )
    parts = call.prompts()
    candidates = call.candidates(len(parts))
    prompts = await _prompts(service, call, parts)
    needs_ranking = candidates > (call.n or 1)
    num_logprobs = 0 if call.logprobs is None and needs_ranking else call.logprobs
    num_prompt_logprobs = _most(call.prompt_logprobs, call.logprobs if call.echo else None)
    form = await reading(call, lambda: asked_form(call.response_format, call.structured_outputs))
    requests = await engine_requests(
        service,
        call,
        prompts,
        candidates,
        caller,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        structured=form.structured,
    )
    return Job(
        id=f"cmpl-{call.request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.adapter_of(call.model) or service.names[0],
        endpoint=ENDPOINT,
        name=call.request_id or name,
        prompts=prompts,
        candidates=candidates,
        requests=requests,
        deadlines=Deadlines(call.queue_timeout, call.timeout),
        stops=call.stops(),
        include_stop=bool(call.include_stop_str_in_output),
        skip_special_tokens=call.skip_special_tokens is not False,
        keeps_ids=num_logprobs is not None or num_prompt_logprobs is not None or bool(call.return_token_ids),
        scores_only=call.max_tokens == 0,
        renamed={"structured_outputs": "response_format"} if call.structured_outputs is None else None,
        left_out=form.left_out,
        cut_limit=cut_limit(call, requests),
    )


async def _prompts(service: Service, call: CompletionRequest, parts: Sequence[str | list[int]]) -> list[Prompt]:
    """The prompts as token ids, truncated if the call asks for it. Parts are all texts or all lists of ids."""
    texts = [part for part in parts if isinstance(part, str)]
    encoded = await service.encode_all(texts, "prompt", call.add_special_tokens is not False)
    prompts = [Prompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]
    prompts += [Prompt(None, part) for part in parts if not isinstance(part, str)]
    context = service.model.context
    prompts = [truncated(prompt, call, context) for prompt in prompts]
    for prompt in prompts:
        if prompt.text is None and len(prompt.ids) <= context:  # longer ones are refused later, for their length
            check_ids(service.model, prompt.ids, "prompt")
    return prompts


def _most(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)


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
        names = _encode({"id": job.id, "object": "text_completion", "created": job.created, "model": job.model})
        self._head = b"data: " + names[:-1] + b',"choices":['
        self._has_usage = call.stream_options is not None and bool(call.stream_options.include_usage)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """One event for the piece."""
        tail = self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
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
        return (self._head + b'],"usage":' + _encode(usage) + b"}\n\n" if self._has_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event of the error, without `[DONE]`."""
        return error_event(error)

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer: the choices of each prompt in order, the best ones first."""
        n, candidates = self._call.n or 1, self._job.candidates
        answered: list[CompletionChoice] = []
        for first in range(0, len(choices), candidates):
            best = choices[first : first + candidates]
            if candidates > n:
                best = sorted(best, key=_mean_logprob, reverse=True)[:n]
            for whole in best:
                answered.append(self._whole_choice(len(answered), self._job.prompts[first // candidates], whole))
        job = self._job
        return _encode(Completion(job.id, "text_completion", job.created, job.model, answered, usage))

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
            scores = prompt_logprobs(self._tokenizer, self._call.prompt_logprobs, prompt.ids, logprobs)
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
        return writer.take_tokens(ids, logprobs)

    def _writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._tokenizer, self._call.logprobs or 0, self._hidden)


def _mean_logprob(choice: Piece) -> float:
    return sum(one.logprob for one in choice.logprobs) / max(1, len(choice.logprobs))
