"""Open requests of `LLM`: the calls, their prompts, and the candidates generated for each prompt."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from orca_jax.llm.outputs import CompletionOutput, Logprobs, RequestOutput, by_id
from orca_jax.text.stream import OutputStream
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.request import RequestMetrics, RequestUpdate, SamplingParams, TokenLogprobs


@dataclass(eq=False)
class OfflineCall:
    """The prompts of one call: the number of open ones, and the outputs that its caller has not taken yet."""

    num_open: int = 0
    done: deque[RequestOutput] = field(default_factory=deque)
    candidates: list[str] = field(default_factory=list)  # ids of the engine's requests
    weight_version: int = 0  # of the weights for all of them

    def has_news(self) -> bool:
        """True if its caller has something to take, or nothing to wait for."""
        return bool(self.done) or not self.num_open


@dataclass(eq=False)
class OpenPrompt:
    """A prompt of a call with its candidates, of which `num_open` have not ended."""

    request_id: str
    call: OfflineCall
    prompt: str | None
    prompt_ids: tuple[int, ...]
    candidates: list["OpenCandidate"] = field(default_factory=list)
    num_open: int = 0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    def add_candidate(self, tokenizer: Tokenizer, params: SamplingParams) -> "OpenCandidate":
        """Add a candidate."""
        stream = OutputStream.for_params(tokenizer, params)
        spells = tokenizer if params.detokenize else None
        candidate = OpenCandidate(
            self, len(self.candidates), stream, spells, params.logprobs is not None
        )
        self.candidates.append(candidate)
        self.num_open += 1
        return candidate

    def output(self) -> RequestOutput:
        """Return the output so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(candidate.completion() for candidate in self.candidates),
            finished=not self.num_open,
            metrics=_joined([candidate.metrics for candidate in self.candidates]),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.candidates[0].num_cached,
            weight_version=self.call.weight_version,
        )


@dataclass(eq=False)
class OpenCandidate:
    """One request of the engine with its output so far."""

    of: OpenPrompt
    index: int
    stream: OutputStream
    spells: Tokenizer | None  # for the texts of log probabilities
    wants_logprobs: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scored: TokenLogprobs | None = None  # of the ids given for it, if it was requested
    pooled: bytes | None = None  # the embedding, if it was requested
    num_cached: int = 0  # tokens of the prompt read from the prefix cache
    error: str | None = None
    # None before the end, and if an error or a stop string was the end
    metrics: RequestMetrics | None = None
    # the first token of each later version of the weights
    changes: dict[int, int] = field(default_factory=dict)

    def take_update(self, update: RequestUpdate) -> bool:
        """Append the text, ids and log probabilities of an iteration. Return True if the text has ended."""
        if update.weight_version is not None and update.new_ids:
            self.changes.setdefault(update.weight_version, len(self.ids))
        self.text += self.stream.push(update.new_ids, update.finish_reason)
        self.ids += update.new_ids
        if update.logprobs and update.logprobs[-1].others is not None:
            self.scored = update.logprobs[-1]
        if update.logprobs:
            pairs = zip(update.new_ids, update.logprobs, strict=True)
            self.logprobs += [by_id(token_id, one, self.spells) for token_id, one in pairs]
        if update.finish_reason is not None:
            self.pooled = update.pooled
            self.error = update.error
        self.num_cached = update.num_cached or self.num_cached
        if update.prompt_logprobs is not None:
            pairs = zip(self.of.prompt_ids[1:], update.prompt_logprobs, strict=True)
            self.of.prompt_logprobs = (
                None,
                *(by_id(token_id, one, self.spells) for token_id, one in pairs),
            )
        return self.stream.finish_reason is not None

    def note_weights(self, version: int) -> None:
        """Note other weights for the tokens from now on."""
        before = self.changes.items()
        self.changes = {each: first for each, first in before if first < len(self.ids)}
        self.changes[version] = len(self.ids)

    def finish(self, metrics: RequestMetrics | None) -> None:
        """End the candidate. With the last one of its prompt, the output of the prompt is done."""
        self.metrics = metrics
        self.of.num_open -= 1
        if not self.of.num_open:
            # before the count: readers in other threads look at it first
            self.of.call.done.append(self.of.output())
            self.of.call.num_open -= 1

    def completion(self) -> CompletionOutput:
        """Return the text so far, without the tokens after a stop string."""
        stream = self.stream
        used = self.stream.num_tokens
        is_done = stream.finish_reason is not None
        ids, logprobs = (
            (self.ids[:used], self.logprobs[:used]) if is_done else (self.ids, self.logprobs)
        )
        chosen = [one[token_id].logprob for token_id, one in zip(ids, logprobs, strict=False)]
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(ids),
            finish_reason=stream.finish_reason,
            stop_reason=stream.stop_reason,
            logprobs=tuple(logprobs) if self.wants_logprobs else None,
            cumulative_logprob=sum(chosen) if self.wants_logprobs else None,
            weight_changes=tuple((first, version) for version, first in self.changes.items()),
        )


def text_pieces(
    call: OfflineCall, candidate: OpenCandidate, turn: Callable[[], None], end: Callable[[], None]
) -> Iterator[str]:
    """Yield the text of a candidate in pieces. The generator is started at once: dropping it unused calls `end` too.

    Args:
        call: the call of this candidate alone.
        candidate: is being generated.
        turn: runs an iteration.
        end: drops the candidate if it is open.
    """

    def pieces() -> Generator[str]:
        shown = 0
        try:
            yield ""
            while call.num_open or shown < len(candidate.text):
                if shown < len(candidate.text):
                    piece = candidate.text[shown:]
                    shown = len(candidate.text)
                    yield piece
                    continue
                turn()
        finally:
            end()

    generator = pieces()
    next(generator)
    return generator


def _joined(metrics: list[RequestMetrics | None]) -> RequestMetrics | None:
    """The times of all candidates: the first ones of the beginning, and the last one of the end."""
    known = [times for times in metrics if times is not None]
    if len(known) < len(metrics):
        return None
    return RequestMetrics(
        arrival=min(times.arrival for times in known),
        first_scheduled=min(times.first_scheduled for times in known),
        first_token=min(times.first_token for times in known),
        finished=max(times.finished for times in known),
    )
