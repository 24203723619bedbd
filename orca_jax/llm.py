"""`LLM`: the engine in this process, for scripts and notebooks, in vLLM's shapes."""

import contextlib
import dataclasses
import difflib
import itertools
import logging
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from tqdm import tqdm

from orca_jax.build.engine import build_engine
from orca_jax.config import EngineConfig
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError, EngineError, RequestError
from orca_jax.request import USUAL, CompletionOutput, RequestOutput, RequestUpdate, SamplingParams, Urgency
from orca_jax.step import TokenLogprobs
from orca_jax.text.bad_words import engine_params
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.stream import OutputStream
from orca_jax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _OpenCall:
    """The requests of one call: how many are open, and what has finished and was not taken yet."""

    num_open: int = 0
    done: deque[RequestOutput] = field(default_factory=deque)


@dataclass(eq=False)
class _OpenRequest:
    """An open request, and what it has generated."""

    batch: _OpenCall
    prompt: str | None
    prompt_ids: tuple[int, ...]
    stream: OutputStream
    wants_logprobs: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def take(self, update: RequestUpdate) -> None:
        """Add what an iteration brought."""
        self.text += self.stream.push(update.new_ids, update.finish_reason)
        self.ids += update.new_ids
        self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs

    def output(self, update: RequestUpdate) -> RequestOutput:
        """The whole, at its end. What came after a stop string is no part of it."""
        stream, used = self.stream, self.stream.num_tokens
        logprobs = tuple(self.logprobs[:used]) if self.wants_logprobs else None
        completion = CompletionOutput(
            index=0,
            text=self.text,
            token_ids=tuple(self.ids[:used]),
            finish_reason=stream.finish_reason,
            stop_reason=stream.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(token.logprob for token in logprobs),
        )
        return RequestOutput(
            request_id=update.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=(completion,),
            metrics=update.metrics,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """Generates text with the engine in this process. Not thread-safe.

    Example:
        llm = LLM(model="demo", max_num_seqs=32)
        for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: "demo", a directory, or "preset:<name>".
        settings: any field of `EngineConfig`.

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names it.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        known = [config_field.name for config_field in dataclasses.fields(EngineConfig)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
                raise ConfigError(f"LLM takes no argument {name!r}{hint}", param=name)
        config = EngineConfig(model=model, **settings)
        self._built = built = build_engine(config)
        self._has_priorities = config.scheduling_policy == "priority"
        self.engine: Engine = built.engine
        self.tokenizer: Tokenizer = built.tokenizer
        self.max_model_len: int = built.max_model_len
        self.timeline_header = (
            built.timeline_header
        )  # what a trace of the engine begins with, for `orca_jax.timeline.record`
        self._grammars: GrammarFactory = built.grammars
        self._numbers = itertools.count()
        self._open: dict[str, _OpenRequest] = {}
        self._abandoned: list[str] = []
        self._stepping = False
        self._unusable: str | None = None  # why

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts and return their outputs in the prompts' order.

        Args:
            prompts: strings or lists of ids, mixed as you like; one alone is a list of one.
            sampling_params: one for all, one for each prompt, or None for the defaults.
            use_tqdm: show a bar on standard error.
            priority: one for each prompt, lower is sooner; needs `scheduling_policy="priority"`. None: all the same.

        Raises:
            RequestError: a prompt or its parameters are wrong; `param` says which, and nothing was run.
        """
        batch, ids = self._add(_as_list(prompts), sampling_params, priority)
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for output in self._drain(batch, ids):
                outputs[output.request_id] = output
                num_tokens += len(output.outputs[0].token_ids)
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update()
        return [outputs[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but hands each output out as soon as its request ends, in that order.

        The engine runs while the next output is asked for. Closing or dropping the iterator aborts what is left.
        """
        return self._drain(*self._add(_as_list(prompts), sampling_params, priority))

    def stream_text(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text that continues one prompt, in pieces as they are generated. Dropping the iterator aborts the rest.

        Raises:
            RequestError: the prompt or its parameters are wrong; `param` says which.
        """
        batch, (request_id,) = self._add([prompt], sampling_params, None)
        pending = self._open[request_id]

        def pieces() -> Generator[str]:
            shown = 0
            try:
                yield ""
                while batch.num_open or shown < len(pending.text):
                    if shown < len(pending.text):
                        piece, shown = pending.text[shown:], len(pending.text)
                        yield piece
                        continue
                    self._check_usable()
                    self._step()
            finally:
                self._abandon([request_id] if request_id in self._open else [])

        generator = pieces()
        next(generator)  # started at once, so that dropping it unused aborts the request too
        return generator

    def close(self) -> None:
        """Free the device's memory. Nothing can be generated afterwards."""
        if self._unusable != "it was closed":
            self._unusable = "it was closed"
            self._built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> tuple[_OpenCall, list[str]]:
        """Queue all prompts, or none of them."""
        self._check_usable()
        self._reap()
        params = _one_for_each(sampling_params, len(prompts))
        urgencies = self._urgencies(priority, len(prompts))
        batch = _OpenCall()
        added: list[str] = []
        try:
            for index, prompt in enumerate(prompts):
                with _naming(index):
                    added.append(self._add_one(batch, prompt, params[index], urgencies[index]))
        except BaseException:
            self._abandon(added)
            raise
        return batch, added

    def _urgencies(self, priority: Sequence[int] | None, count: int) -> list[Urgency]:
        if priority is None:
            return [USUAL] * count
        if len(priority) != count:
            raise RequestError(f"{len(priority)} priorities for {count} prompts; give one for each", param="priority")
        if any(priority) and not self._has_priorities:
            message = 'priority must be 0 here: this LLM was not made with scheduling_policy="priority"'
            raise RequestError(message, param="priority")
        return [Urgency(one) for one in priority]

    def _add_one(self, batch: _OpenCall, prompt: Prompt, params: SamplingParams, urgency: Urgency) -> str:
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = str(next(self._numbers))
        constraint = None if params.structured is None else self._grammars.compile(params.structured)
        self.engine.add(request_id, ids, engine_params(params, self.tokenizer), constraint, urgency)
        self._open[request_id] = _OpenRequest(
            batch,
            prompt if isinstance(prompt, str) else None,
            tuple(ids),
            OutputStream.for_params(self.tokenizer, params),
            params.logprobs is not None,
        )
        batch.num_open += 1
        return request_id

    def _drain(self, batch: _OpenCall, ids: list[str]) -> Iterator[RequestOutput]:
        """Yield the batch's outputs; started at once, so that dropping it unused aborts the batch too."""

        def outputs() -> Generator[RequestOutput | None]:
            try:
                yield None
                while batch.done or batch.num_open:
                    if not batch.done:
                        self._check_usable()
                        self._step()
                        continue
                    yield batch.done.popleft()
            finally:
                self._abandon([request_id for request_id in ids if request_id in self._open])

        generator = outputs()
        next(generator)
        return cast(Iterator[RequestOutput], generator)  # only its first value was None

    def _step(self) -> None:
        """One iteration, whose updates may belong to any open batch."""
        with _interrupt_later():
            self._step_whole()
        self._reap()

    def _step_whole(self) -> None:
        self._stepping = True
        try:
            for update in self.engine.step():
                self._take(update)
        except BaseException as error:
            # An iteration was cut in two, so that scheduler and device may disagree from here on.
            self._unusable = self._unusable or f"it failed with {type(error).__name__}: {error}"
            raise
        finally:
            self._stepping = False

    def _take(self, update: RequestUpdate) -> None:
        pending = self._open.get(update.request_id)
        if pending is None:
            return  # abandoned
        pending.take(update)
        if pending.stream.finish_reason is None:
            return
        if update.error is not None:
            logger.warning("request %s failed: %s", update.request_id, update.error)
        if update.finish_reason is None:  # a stop string, of which the engine knows nothing
            self._abandoned.append(update.request_id)
        else:
            del self._open[update.request_id]
        pending.batch.num_open -= 1
        pending.batch.done.append(pending.output(update))

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these. May be called by the garbage collector, so also in the middle of a step."""
        self._abandoned += request_ids
        if not self._stepping:
            self._reap()

    def _reap(self) -> None:
        """Abort what was abandoned. With nothing open, an iteration still on the device is awaited: no work is left."""
        if self._unusable is not None:
            return
        while self._abandoned:
            request_id = self._abandoned.pop()
            if self._open.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        while not self._open and self.engine.has_work:
            self._step()

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise EngineError(f"this LLM cannot be used any more: {self._unusable}; make a new one")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is a string, a list of ids, or a list of these, not {type(prompts).__name__}")
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts", param="sampling_params")
    return params


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt an error is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompts[{index}]: {error.message}", param=f"prompts[{index}]") from error


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Let Ctrl-C wait until an iteration is whole, so that the engine can go on afterwards."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    interrupts: list[Any] = []
    signal.signal(signal.SIGINT, lambda *details: interrupts.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if interrupts:
            previous(*interrupts[0])
