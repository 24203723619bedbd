"""Open requests of `LLM`: the calls, their prompts, and the candidates generated for each prompt."""

from collections import deque
from dataclasses import dataclass, field

from orca_jax.request import CompletionOutput, RequestMetrics, RequestOutput, RequestUpdate, TokenLogprobs
from orca_jax.text.stream import OutputStream


@dataclass(eq=False)
class OfflineCall:
    """The prompts of one call: the number of open ones, and the outputs that its caller has not taken yet."""

    num_open: int = 0
    done: deque[RequestOutput] = field(default_factory=deque)
    candidates: list[str] = field(default_factory=list)  # ids of the engine's requests


@dataclass(eq=False)
class OpenPrompt:
    """A prompt of a call, with the finished ones of its `num_candidates` candidates."""

    request_id: str
    call: OfflineCall
    prompt: str | None
    prompt_ids: tuple[int, ...]
    num_candidates: int
    _finished: dict[int, tuple[CompletionOutput, RequestMetrics | None]] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def finish(self, completion: CompletionOutput, metrics: RequestMetrics | None) -> None:
        """Take the last state of one candidate. With the last candidate, the output is done."""
        self._finished[completion.index] = completion, metrics
        if len(self._finished) == self.num_candidates:
            self.call.num_open -= 1
            self.call.done.append(self._output())

    def _output(self) -> RequestOutput:
        finished = [self._finished[index] for index in range(self.num_candidates)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(completion for completion, _ in finished),
            metrics=_joined([metrics for _, metrics in finished]),
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(eq=False)
class OpenCandidate:
    """One request of the engine with its output so far."""

    of: OpenPrompt
    index: int
    stream: OutputStream
    wants_logprobs: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, update: RequestUpdate) -> None:
        """Append the text, ids and log probabilities of an iteration."""
        self.text += self.stream.push(update.new_ids, update.finish_reason)
        self.ids += update.new_ids
        self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.of.prompt_logprobs = update.prompt_logprobs

    def finish(self, metrics: RequestMetrics | None) -> None:
        """Pass the finished text to the prompt, without the tokens after a stop string."""
        stream, used = self.stream, self.stream.num_tokens
        logprobs = tuple(self.logprobs[:used]) if self.wants_logprobs else None
        completion = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.ids[:used]),
            finish_reason=stream.finish_reason,
            stop_reason=stream.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(token.logprob for token in logprobs),
        )
        self.of.finish(completion, metrics)


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
