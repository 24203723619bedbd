"""`LLM`: the engine in this process, for scripts and notebooks, with the interface of vLLM."""

import contextlib
import dataclasses
import itertools
import logging
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from orca_jax import progress
from orca_jax.build.engine import build_engine
from orca_jax.checks import unknown_name
from orca_jax.config import EngineConfig
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError, EngineError, RequestError
from orca_jax.request import (
    DEFAULT_URGENCY,
    CompletionOutput,
    RequestOutput,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
    Urgency,
)
from orca_jax.text.bad_words import engine_params
from orca_jax.text.encoding_threads import EncodingThreads
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.stream import OutputStream
from orca_jax.text.tokenizer import Tokenizer, check_characters

PromptInput = str | Sequence[int]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _OfflineCall:
    """The requests of one call: the number of open ones, and the outputs that its caller has not taken yet."""

    num_open: int = 0
    done: deque[RequestOutput] = field(default_factory=deque)


@dataclass(eq=False)
class _OpenRequest:
    """An open request with its output so far."""

    call: _OfflineCall
    prompt: str | None
    prompt_ids: tuple[int, ...]
    stream: OutputStream
    wants_logprobs: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def take(self, update: RequestUpdate) -> None:
        """Append the text, ids and log probabilities of an iteration."""
        self.text += self.stream.push(update.new_ids, update.finish_reason)
        self.ids += update.new_ids
        self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs

    def output(self, update: RequestUpdate) -> RequestOutput:
        """Return the whole output of the finished request, without the tokens after a stop string."""
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
    """An engine in this process that generates text. It is not thread-safe.

    Example:
        llm = LLM(model="demo", max_num_seqs=32)
        for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: "demo", a directory, a name of the Hugging Face Hub (ORG/NAME), or "preset:<name>".
        settings: any field of `EngineConfig`.

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names it.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        known = [config_field.name for config_field in dataclasses.fields(EngineConfig)]
        for name in settings:
            if name not in known:
                raise ConfigError(unknown_name("LLM", name, known), param=name)
        config = EngineConfig(model=model, **settings)
        self._built = built = build_engine(config)
        self._has_priorities = config.scheduling_policy == "priority"
        self.engine: Engine = built.engine
        self.tokenizer: Tokenizer = built.tokenizer
        self.max_model_len: int = built.max_model_len
        self.timeline_header = built.timeline_header  # for `orca_jax.timeline.record`
        self._grammars: GrammarFactory = built.grammars
        self._threads = EncodingThreads()
        self._numbers = itertools.count()
        self._open: dict[str, _OpenRequest] = {}
        self._abandoned: list[str] = []
        self._stepping = False
        self._unusable: str | None = None  # the reason

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts, and return their outputs in the order of the prompts.

        Args:
            prompts: strings or lists of token ids, also mixed; a single prompt counts as a list of one.
            sampling_params: one for all prompts, one for each prompt, or None for the defaults.
            use_tqdm: show a progress bar on standard error.
            priority: one number for each prompt; a lower one runs sooner. It needs `scheduling_policy="priority"`.
                None: all prompts have the same priority.

        Raises:
            RequestError: a prompt or its parameters are wrong; `param` names it. No prompt was run.
        """
        call, ids = self._add(_as_list(prompts), sampling_params, priority)
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        options = {"desc": "Generating", "unit": "req", "disable": not use_tqdm, "dynamic_ncols": True}
        with progress.bar(total=len(ids), **options) as bar:
            for output in self._drain(call, ids):
                outputs[output.request_id] = output
                num_tokens += len(output.outputs[0].token_ids)
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update()
        return [outputs[request_id] for request_id in ids]

    def stream(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield each output as soon as its request ends.

        The engine runs only during calls of `next`. Closing or dropping the iterator aborts the remaining requests.
        Arguments and errors are as in `generate`.
        """
        return self._drain(*self._add(_as_list(prompts), sampling_params, priority))

    def stream_text(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the generated text of one prompt in pieces. Closing or dropping the iterator aborts the request.

        Raises:
            RequestError: the prompt or its parameters are wrong; `param` names it.
        """
        call, (request_id,) = self._add([prompt], sampling_params, None)
        request = self._open[request_id]

        def pieces() -> Generator[str]:
            shown = 0
            try:
                yield ""
                while call.num_open or shown < len(request.text):
                    if shown < len(request.text):
                        piece, shown = request.text[shown:], len(request.text)
                        yield piece
                        continue
                    self._check_usable()
                    self._step()
            finally:
                self._abandon([request_id] if request_id in self._open else [])

        generator = pieces()
        next(generator)  # start it, so that dropping it unused aborts the request too
        return generator

    def close(self) -> None:
        """Free the memory of the device. The LLM cannot be used afterwards."""
        if self._unusable != "it was closed":
            self._unusable = "it was closed"
            self._built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(
        self,
        prompts: Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> tuple[_OfflineCall, list[str]]:
        """Add all prompts to the engine, or none of them."""
        self._check_usable()
        self._reap()
        params = _one_for_each(sampling_params, len(prompts))
        urgencies = self._urgencies(priority, len(prompts))
        call = _OfflineCall()
        added: list[str] = []
        try:
            for index, prompt in enumerate(prompts):
                with _naming(index):
                    added.append(self._add_one(call, prompt, params[index], urgencies[index]))
        except BaseException:
            self._abandon(added)
            raise
        return call, added

    def _urgencies(self, priority: Sequence[int] | None, count: int) -> list[Urgency]:
        if priority is None:
            return [DEFAULT_URGENCY] * count
        if len(priority) != count:
            raise RequestError(
                f"{len(priority)} priorities for {count} prompts; give one for each prompt", param="priority"
            )
        if any(priority) and not self._has_priorities:
            message = 'priority must be 0, since this LLM was not created with scheduling_policy="priority"'
            raise RequestError(message, param="priority")
        return [Urgency(one) for one in priority]

    def _add_one(self, call: _OfflineCall, prompt: PromptInput, params: SamplingParams, urgency: Urgency) -> str:
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(
                f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}", "prompt"
            )
        ids, in_ids = self._in_ids(prompt, params)
        request_id = str(next(self._numbers))
        constraint = None if params.structured is None else self._grammars.compile(params.structured)
        self.engine.add(request_id, ids, in_ids, constraint, urgency)
        self._open[request_id] = _OpenRequest(
            call,
            prompt if isinstance(prompt, str) else None,
            tuple(ids),
            OutputStream.for_params(self.tokenizer, params),
            params.logprobs is not None,
        )
        call.num_open += 1
        return request_id

    def _in_ids(self, prompt: PromptInput, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """The prompt, and the parameters for the engine, with all texts encoded."""

        def convert() -> tuple[list[int], SamplingParams]:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            return ids, engine_params(params, self.tokenizer)

        if isinstance(prompt, str):
            check_characters(prompt, self.max_model_len, self.tokenizer)
        return self._threads.run(convert) if isinstance(prompt, str) or params.bad_words else convert()

    def _drain(self, call: _OfflineCall, ids: list[str]) -> Iterator[RequestOutput]:
        """Yield the outputs of a call. The generator is started at once: dropping it unused aborts the requests too."""

        def outputs() -> Generator[RequestOutput | None]:
            try:
                yield None
                while call.done or call.num_open:
                    if not call.done:
                        self._check_usable()
                        self._step()
                        continue
                    yield call.done.popleft()
            finally:
                self._abandon([request_id for request_id in ids if request_id in self._open])

        generator = outputs()
        next(generator)
        return cast(Iterator[RequestOutput], generator)  # only the first value is None

    def _step(self) -> None:
        """Run one iteration; its updates may belong to any open call."""
        with _interrupt_later():
            self._step_whole()
        self._reap()

    def _step_whole(self) -> None:
        self._stepping = True
        try:
            for update in self.engine.step():
                self._take(update)
        except BaseException as error:
            # The iteration is incomplete, so the scheduler and the device may no longer agree.
            self._unusable = self._unusable or f"it failed with {type(error).__name__}: {error}"
            raise
        finally:
            self._stepping = False

    def _take(self, update: RequestUpdate) -> None:
        request = self._open.get(update.request_id)
        if request is None:
            return  # abandoned
        request.take(update)
        if request.stream.finish_reason is None:
            return
        if update.error is not None:
            logger.warning("request %s failed: %s", update.request_id, update.error)
        if update.finish_reason is None:  # ended by a stop string, which the engine does not look for
            self._abandoned.append(update.request_id)
        else:
            del self._open[update.request_id]
        request.call.num_open -= 1
        request.call.done.append(request.output(update))

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Abort these requests; during a step, after it. The garbage collector may call this at any time."""
        self._abandoned += request_ids
        if not self._stepping:
            self._reap()

    def _reap(self) -> None:
        """Abort the abandoned requests. If no request is open then, finish the iterations in flight."""
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
            raise EngineError(f"this LLM cannot be used any more: {self._unusable}; create a new one")


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, a list of token ids, or a list of these, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptInput], prompts))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        message = f"sampling_params must be a SamplingParams or a list of them, not {type(params).__name__}"
        raise RequestError(message, param="sampling_params")
    if len(params) != count:
        message = f"{len(params)} sampling_params for {count} prompts; give one for each prompt, or one for all"
        raise RequestError(message, param="sampling_params")
    return params


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Add the index of the prompt to an error."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompts[{index}]: {error.message}", param=f"prompts[{index}]") from error


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Delay Ctrl-C until the iteration is complete, so that the engine can be used afterwards."""
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
