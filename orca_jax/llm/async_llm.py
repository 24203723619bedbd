"""`AsyncLLM`: an engine process for a service with an event loop of its own, with the interface of vLLM."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from orca_jax.link.changes.asked import SLEEP_TAGS
from orca_jax.link.client import EngineClient, OpenCall
from orca_jax.link.errors import CallTooLarge, LinkError, Overloaded
from orca_jax.link.supervisor import Supervisor
from orca_jax.link.wire import PauseMode, Ready, Rejected, SleepTag, Submit
from orca_jax.llm.arguments import (
    PlainPrompt,
    PromptInput,
    check_same_adapter,
    check_version,
    config_errors,
    encoded,
    engine_settings,
    plain_prompt,
)
from orca_jax.llm.chat import Conversation, Conversations, as_conversations
from orca_jax.llm.decide import DecisionTexts
from orca_jax.llm.new_weights import save_tree
from orca_jax.llm.open_requests import OfflineCall, OpenCandidate, OpenPrompt
from orca_jax.llm.outputs import RequestOutput
from orca_jax.server_config import ServerConfig
from orca_jax.text.decisions.questions import Question
from orca_jax.text.decisions.reads import FitsByKind, OptionOrder, TypedAnswer, own_salt
from orca_jax.text.tokenizer import Tokenizer, check_characters, load_tokenizer
from orca_jax.text.work_threads import ENCODING, WorkThreads
from orca_jax.values.errors import ConfigError, EngineDeadError, EngineError, RequestError
from orca_jax.values.lora_request import LoRARequest
from orca_jax.values.request import (
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
    Urgency,
    of_candidate,
)


@dataclass(frozen=True)
class _Texts:
    """The parts of a served model that handle texts."""

    tokenizer: Tokenizer
    conversations: Conversations
    most_tokens: int  # of a prompt
    decisions: DecisionTexts


def _take_updates(
    call: OpenCall,
    candidates: Mapping[str, OpenCandidate],
    updates: Iterable[RequestUpdate | Rejected],
) -> None:
    """Add new tokens to their candidates. Raises RequestError: the engine refused the request."""
    for update in updates:
        if isinstance(update, Rejected):
            raise RequestError(update.message, param=update.param)
        candidate = candidates[update.request_id]
        if candidate.stream.finish_reason is not None or not candidate.take_update(update):
            continue  # after a stop string, or in the middle of an answer
        if update.finish_reason is None:
            call.abort(update.request_id)  # ended by a stop string
        candidate.finish(update.metrics)


class AsyncLLM:
    """An engine in its own process. All methods belong to one event loop.

    Calls of many tasks run in the same iterations. An async context manager: entering it waits until the engine
    serves, and leaving it ends the engine and all open calls.

    Example:
        async with AsyncLLM(model="demo") as llm:
            async for output in llm.generate("The sea was", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Args:
        model: "demo", a directory, or "preset:<name>".
        settings: any field of `EngineConfig`.

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names it.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._config = ServerConfig(engine=engine_settings("AsyncLLM", model, settings))
        self._threads = WorkThreads(ENCODING)
        self._numbers = itertools.count()
        self._client: EngineClient | None = None
        self._engine: asyncio.Task[None] | None = None
        self._texts: _Texts | None = None
        self._loading: dict[str, asyncio.Task[str]] = {}  # first uses of adapters, by name

    async def __aenter__(self) -> Self:
        """Start the engine, and wait until it serves.

        Raises:
            ConfigError: a setting, a model directory or a checkpoint is wrong.
            EngineDeadError: the engine ended while it was loading.
        """
        client = self._client = EngineClient(self._config)
        self._engine = asyncio.create_task(
            Supervisor(self._config, client, self._set_ready).run_engines()
        )
        try:
            await asyncio.wait((self._engine, client.ready), return_when="FIRST_COMPLETED")
            if self._engine.done():
                self._engine.result()
            ready = await client.ready
        except BaseException:
            await self.__aexit__()
            raise
        self.max_model_len: int = ready.max_model_len
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None and self._engine is not None:
            self._client.stop()
            self._engine.cancel()
            await asyncio.gather(self._engine, return_exceptions=True)
            self._engine = None
        if self._texts is not None:
            self._texts.conversations.close()
            self._texts = None

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the output so far after each iteration that changes it; the last one is `finished`.

        Closing the iterator aborts the request.

        Args:
            prompt: a text, token ids, or a dict as in vLLM.
            sampling_params: None for the defaults.
            request_id: the id in the outputs; None: a number.
            priority: a lower one runs sooner. It needs `scheduling_policy="priority"`.
            lora_request: an adapter. It needs `enable_lora=True`; the first use of its name loads it.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the queue is full; `param` names the field.
            EngineError: the engine has ended, or does not respond.
        """
        params = sampling_params or SamplingParams()
        plain = plain_prompt(prompt)
        async for output in self._outputs(plain, params, priority, True, lora_request, request_id):
            yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the answer to one conversation, as `generate` does. The arguments are those of `LLM.chat`."""
        _, texts = self._parts()
        (conversation,) = as_conversations(messages)
        text = await asyncio.to_thread(
            texts.conversations.render,
            conversation,
            template_file=chat_template,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        params = sampling_params or SamplingParams()
        async for output in self._outputs(text, params, priority, False, lora_request):
            yield output

    async def decide(
        self,
        state: Any,
        questions: Sequence[Question],
        *,
        order: OptionOrder = "given",
        temperature: float = 1.0,
        calibration: FitsByKind | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[TypedAnswer]:
        """Answer typed questions about a state. Arguments, answers and errors are those of `LLM.decide`."""
        client, texts = self._parts()
        arguments = (order, temperature, chat_template, chat_template_kwargs)
        prepare = partial(texts.decisions.reading, state, questions, *arguments)
        reading = await self._threads.run_async(prepare)
        adapter = None if lora_request is None else await self._adapter(client, lora_request)
        reuses = client.summary is not None and client.summary.reuses_prefixes
        salt = own_salt(cache_salt, reuses_prefixes=reuses)
        urgency = Urgency(priority)
        submits = [
            Submit(
                client.new_request_id(),
                read.prompt_ids,
                read.params(reading.shared, salt),
                urgency,
                adapter,
            )
            for read in reading.reads
        ]
        scores = await _read_scores(client, submits)
        return reading.decisions(scores, temperature, calibration)

    async def update_params(
        self, params: Any, version: int | None = None, *, abort_all_requests: bool = False
    ) -> int:
        """Replace the weights without compiling anything, and return their version, which outputs carry.

        The engine serves while it reads the new weights. Requests that are open then finish with the old ones, and
        later requests wait. The arguments are those of `LLM.update_params`. A tree is written to a temporary folder as
        an Orbax checkpoint, which the process of the engine reads; the path of a checkpoint must lead there for it too.

        Raises:
            ConfigError: the parameters do not fit, or these weights cannot be replaced; the weights are unchanged.
            EngineError: the engine has ended.
        """
        client, _ = self._parts()
        check_version(version)
        try:
            if isinstance(params, str | PathLike):
                path = os.path.abspath(params)
                return await _asked(client.update_weights(path, version, aborts=abort_all_requests))
            with tempfile.TemporaryDirectory(prefix="orca_jax_weights_") as folder:
                await asyncio.to_thread(save_tree, params, Path(folder))
                update = client.update_weights(folder, version, aborts=abort_all_requests)
                return await _asked(update)
        except RequestError as error:
            raise ConfigError(error.message, error.param) from None

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, as `LLM.reset_prefix_cache`. Raises EngineError if the engine has ended."""
        client, _ = self._parts()
        await _asked(client.changes.reset_prefix_cache())
        return True

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Let new requests wait until `resume_generation`; return when the pause has begun.

        Args:
            mode: open requests end with the reason "abort", finish ("wait"), or are kept as they are ("keep").
            clear_cache: empty the prefix cache when no request is left.

        Raises:
            ConfigError: the mode does not exist.
            EngineError: the engine has ended.
        """
        client, _ = self._parts()
        await _changed(client.changes.pause(mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        """End the pause: requests that waited are added. Raises EngineError if the engine has ended."""
        client, _ = self._parts()
        await _asked(client.changes.resume())

    async def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""
        client, _ = self._parts()
        return client.changes.is_paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free the devices' memory until `wake_up`; new requests wait.

        Args:
            level: 1 copies the weights to the memory of the host; 2 drops them, and `update_params` puts others there.
            mode: open requests end with the reason "abort", or finish ("wait").

        Raises:
            ConfigError: an argument is wrong, or an engine of several processes cannot sleep.
            EngineError: the engine has ended.
        """
        client, _ = self._parts()
        await _changed(client.changes.sleep(level, mode))

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Put back the weights, the pages ("kv_cache"), or both; with all of it there, requests that waited are added.

        Raises:
            ConfigError: a tag does not exist, or the weights were dropped.
            EngineError: the engine has ended.
        """
        client, _ = self._parts()
        await _changed(client.changes.wake_up(SLEEP_TAGS if tags is None else tags))

    async def is_sleeping(self) -> bool:
        """True while weights or pages are not on the devices."""
        client, _ = self._parts()
        return bool(client.changes.asleep)

    async def _outputs(
        self,
        prompt: PlainPrompt,
        params: SamplingParams,
        priority: int,
        add_special_tokens: bool,
        lora_request: LoRARequest | None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        client, texts = self._parts()
        if priority and "priority" not in client.reads:
            message = 'priority must be 0, since this engine was not started with scheduling_policy="priority"'
            raise RequestError(message, param="priority")
        check = partial(_checked, texts, prompt, params, add_special_tokens)
        ids, in_ids = await self._threads.run_async(check)
        adapter = None
        if lora_request is not None:
            adapter = await self._adapter(client, lora_request)
        if request_id is None:
            request_id = str(next(self._numbers))
        text = prompt if isinstance(prompt, str) else None
        of = OpenPrompt(request_id, OfflineCall(num_open=1), text, tuple(ids))
        candidates: dict[str, OpenCandidate] = {}
        submits: list[Submit] = []
        for index in range(params.n):
            candidate_id = client.new_request_id()
            candidates[candidate_id] = of.add_candidate(texts.tokenizer, params)
            own = of_candidate(in_ids, index)
            submits.append(Submit(candidate_id, ids, own, Urgency(priority), adapter))
        try:
            async with client.open(submits) as call:
                while of.num_open:
                    _take_updates(call, candidates, await call.receive())
                    of.call.weight_version = call.weight_version or 0
                    yield of.output()
        except (Overloaded, CallTooLarge) as error:
            raise RequestError(error.message, param="prompt") from None
        except LinkError as error:
            raise EngineDeadError(error.message) from None

    async def _adapter(self, client: EngineClient, request: LoRARequest) -> str:
        """The name of a loaded adapter. The first use of a name loads it, also if its call is cancelled meanwhile.

        Raises:
            RequestError: the adapter cannot be loaded, or its name stands for another one.
            EngineDeadError: the engine does not serve, or ends.
        """
        name = request.lora_name
        if not self._config.engine.enable_lora:
            message = "lora_request needs an AsyncLLM created with enable_lora=True"
            raise RequestError(message, param="lora_request")
        if name not in client.adapters.loaded:
            if name not in self._loading:
                loading = client.adapters.load(name, request.lora_path)
                self._loading[name] = asyncio.create_task(loading)
                self._loading[name].add_done_callback(partial(self._end_loading, name))
            try:
                await asyncio.shield(self._loading[name])  # other calls may wait for it, too
            except LinkError as error:
                raise EngineDeadError(error.message) from None
        check_same_adapter(request, client.adapters.loaded.get(name, request.lora_path))
        return name

    def _end_loading(self, name: str, task: asyncio.Task[str]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # without a reader asyncio would log it as never retrieved

    async def _set_ready(self, ready: Ready) -> None:
        tokenizer = await asyncio.to_thread(load_tokenizer, ready.tokenizer)
        most_tokens = min(ready.max_model_len, ready.n_slots)
        conversations = Conversations(ready.source)
        decisions = DecisionTexts(tokenizer, conversations, most_tokens)
        self._texts = _Texts(tokenizer, conversations, most_tokens, decisions)

    def _parts(self) -> tuple[EngineClient, _Texts]:
        """The client and the tokenizer of the engine. Raises EngineError before the start and after the end."""
        if self._client is None or self._texts is None:
            message = "this AsyncLLM is not open: use it as `async with AsyncLLM(...) as llm:`"
            raise EngineError(message)
        return self._client, self._texts


async def _read_scores(client: EngineClient, submits: Sequence[Submit]) -> list[TokenLogprobs]:
    """The scores of all reads of a call. Raises RequestError and EngineError."""
    found: dict[str, TokenLogprobs] = {}
    try:
        async with client.open(submits) as call:
            while len(found) < len(submits):
                found |= {update.request_id: _scores_in(update) for update in await call.receive()}
    except (Overloaded, CallTooLarge) as error:
        raise RequestError(error.message, param="state") from None
    except LinkError as error:
        raise EngineDeadError(error.message) from None
    return [found[each.request_id] for each in submits]


def _scores_in(update: RequestUpdate | Rejected) -> TokenLogprobs:
    if isinstance(update, Rejected):
        raise RequestError(update.message, param="state")
    if not update.logprobs:
        raise EngineError(f"a question was not answered: {update.error or 'it was aborted'}")
    return update.logprobs[-1]


def _checked(
    texts: _Texts, prompt: PlainPrompt, params: SamplingParams, add_special_tokens: bool
) -> tuple[list[int], SamplingParams]:
    """The ids of a prompt, and the parameters for the engine. Raises RequestError."""
    if isinstance(prompt, str):
        check_characters(prompt, texts.most_tokens, texts.tokenizer)
    elif not all(type(token) is int for token in prompt):
        raise RequestError("a prompt must be a string or a list of token ids", param="prompt")
    return encoded(prompt, params, texts.tokenizer, add_special_tokens, texts.most_tokens)


async def _changed(change: Awaitable[None]) -> None:
    """Wait for a pause or sleep. Raises ConfigError if it is refused, and EngineError if the engine has ended."""
    with config_errors():
        await _asked(change)


async def _asked[T](change: Awaitable[T]) -> T:
    """The result of a change of the engine. Raises EngineError if it has ended."""
    try:
        return await change
    except LinkError as error:
        raise EngineDeadError(error.message) from None
