"""Sampler for the workers of Tunix that are still experimental, with an `LLM` in the same process.

`OrcaSampler` has the methods of `tunix.experimental.rollout.sampler.Sampler`, of commit 035dbdb9, which is a protocol:
nothing is inherited. Tunix is imported for its answers, and is no dependency of this package.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from orca_jax.llm.offline import LLM
from orca_jax.llm.open_requests import OfflineCall
from orca_jax.llm.outputs import RequestOutput
from orca_jax.llm.rollout_engine import RolloutEngine, logprobs_of
from orca_jax.values.errors import ConfigError, EngineError, RequestError

SAMPLER = "tunix.experimental.rollout.sampler"
DATATYPES = "tunix.experimental.common.datatypes"
_MOST_THREADS = 256  # one for each call of `sample` that is open
_REASONS = {"abort": "cancelled"}
_NOT_HERE = ("return_logits", "beam_size", "return_routed_experts")


class OrcaSampler:
    """A sampler for `RolloutWorker(sampler=...)`. Any number of calls of `sample` run in the same iterations.

    Args:
        server_id: its name among samplers.
        model: see `orca_rollout`.
        trainer_tokenizer: the tokenizer of Tunix; None for the tokenizer of `model`.
        filters: see `orca_rollout`.
        lora_alpha: see `orca_rollout`.
        rank: the rank of adapters; 0 for weights without them.
        settings: see `orca_rollout`.
    """

    def __init__(
        self,
        server_id: str,
        model: str,
        *,
        trainer_tokenizer: Any = None,
        filters: bool = False,
        lora_alpha: float | None = None,
        rank: int = 0,
        **settings: Any,
    ) -> None:
        self.server_id = server_id
        self._make = partial(
            RolloutEngine,
            model=model,
            filters=filters,
            lora_alpha=lora_alpha,
            rank=rank,
            tokenizer=trainer_tokenizer,
            settings={"logprobs_mode": "processed_logprobs", **settings},
        )
        self._made: RolloutEngine | None = None
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="sampler")
        self._is_round = False  # between `pre_weight_sync` and its end
        self._staged: Any = None  # weights of the round

    def initialize(self) -> None:
        """Load the model, unless it is loaded."""
        if self._made is None:
            self._made = self._make()

    async def start(self, **_: Any) -> bool:
        """Load the model, unless it is loaded."""
        await self._run(self.initialize)
        return True

    async def stop(self, **_: Any) -> bool:
        """Free the devices. Open calls end with an error."""
        if self._made is not None:
            await self._run(self._made.llm.close)
        self._threads.shutdown(wait=False)
        return True

    async def pause(self, *, mode: Any = "keep", clear_cache: bool = False, **_: Any) -> bool:
        """Pause as `LLM.pause_generation` does."""
        await self._run(partial(self._llm.pause_generation, mode=mode, clear_cache=clear_cache))
        return True

    async def resume(self, **_: Any) -> bool:
        """End the pause."""
        await self._run(self._llm.resume_generation)
        return True

    async def get_mesh(self, **_: Any) -> Any:
        """The mesh of the devices, of the first stage of several. Raises ConfigError, as `get_target_state` does."""
        return jax.tree.leaves(self._engine.weight_shapes())[0].sharding.mesh

    async def get_load_info(self, **_: Any) -> Any:
        """The numbers of requests, and the part of the pages that is used."""
        stats = self._llm.engine.stats
        return importlib.import_module(SAMPLER).LoadInfo(
            num_requests_waiting=stats.waiting,
            num_requests_running=stats.running,
            kv_cache_usage_perc=1 - stats.free_pages / max(1, stats.num_pages),
        )

    async def sample(self, sampling_requests: Any, **_: Any) -> Any:
        """Sample a text for one request, or for each of a sequence, and return its answer, or a list of them.

        An answer has the error of its own request. A caller that is cancelled aborts its requests.
        """
        is_one = not isinstance(sampling_requests, list | tuple)
        requests = [sampling_requests] if is_one else sampling_requests
        batch = _OpenSample(self._engine)
        task = self._run(partial(self._sample, requests, batch))
        try:
            answers = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._threads.submit(batch.cancel)
            raise
        return answers[0] if is_one else answers

    def _sample(self, requests: Sequence[Any], batch: "_OpenSample") -> list[Any]:
        """Add the requests, then wait for each."""
        with jax.transfer_guard("allow"):
            added = [self._add(request, batch) for request in requests]
            pairs = zip(requests, added, strict=True)
            return [self._answer(request, found) for request, found in pairs]

    def _add(self, request: Any, batch: "_OpenSample") -> OfflineCall | RequestError:
        try:
            return batch.add(self._ids(_prompt(request)), _config(request))
        except RequestError as error:
            return error

    def _answer(self, request: Any, found: OfflineCall | RequestError) -> Any:
        """Tunix's answer to a request, when its text has ended."""
        kind = importlib.import_module(SAMPLER).SamplingResponse
        name = getattr(request, "request_id", "")
        if isinstance(found, RequestError):
            return kind(request_id=name, finish_reason="error", error=_error_info(found))
        [output] = self._engine.wait(found)
        [text] = output.outputs
        reason = text.finish_reason or "error"
        error = None
        if reason == "error":
            error = _error_info(EngineError("the logits of this request were not finite"))
        return kind(
            request_id=name,
            text=self._engine.decode(text.token_ids),
            prompt_token_ids=np.array(output.prompt_token_ids, np.int32),
            token_ids=np.array(text.token_ids, np.int32),
            logprobs=_logprobs(output),
            finish_reason=_REASONS.get(reason, reason),
            error=error,
            metadata={"policy_version": output.weight_version},
        )

    def _ids(self, prompt: Any) -> list[int]:
        """The ids of a text, a conversation, or an array of ids."""
        if isinstance(prompt, str):
            return self._engine.encode(prompt)
        if isinstance(prompt, Mapping):
            prompt = [prompt]
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self._engine.encode_chat(prompt)
        return [int(token) for token in np.asarray(prompt).reshape(-1)]

    def get_target_state(self) -> Any:
        """A tree of shapes and types, into which a trainer may convert its weights. Raises ConfigError."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        return jax.tree.map(shape, self._engine.weight_shapes())

    async def bind_weight_sync(self, sync_request: Any = None, **_: Any) -> None:
        """Bind nothing: weights come by reference, or as the path of a checkpoint."""

    async def get_weight_sync_metadata(self, **_: Any) -> Any:
        """Raise NotImplementedError: there is no transport."""
        raise NotImplementedError("OrcaSampler takes WeightSyncRequest.weights: a tree, or a path")

    async def pre_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Begin a round: open requests finish, and others wait for its end."""
        self._is_round = True
        await self._run(partial(self._llm.pause_generation, mode="wait"))
        return True

    async def weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Check new weights, and keep them until `post_weight_sync`; without a round use them at once.

        Raises:
            ConfigError: they do not fit, or there are none. The weights in use are unchanged.
            RequestError: an adapter does not fit.
        """
        if getattr(sync_request, "weights", None) is None:
            raise ConfigError("weight_sync needs a request with weights", param="sync_request")
        if not self._is_round:
            await self._run(partial(self._publish, sync_request))
            return True
        await self._run(partial(self._engine.check_params, sync_request.weights))
        self._staged = sync_request
        return True

    async def post_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Use the weights of the round, and end it. A second call does nothing."""
        if self._staged is not None:
            await self._run(partial(self._publish, self._staged))
        return await self.abort_weight_sync()

    async def abort_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """End the round with the weights that are in use."""
        self._staged = None
        if self._is_round:
            self._is_round = False
            await self.resume()
        return True

    async def get_transfer_status(self, req_id: Any, **_: Any) -> str:
        """Weights have arrived when `weight_sync` returns."""
        return "SUCCESS"

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: list[int], **_: Any
    ) -> bool:
        """False: pages stay where they are, and another sampler computes the tokens again."""
        return False

    def _publish(self, request: Any) -> None:
        self._engine.update_params(request.weights, version=request.policy_version or None)

    @property
    def _engine(self) -> RolloutEngine:
        if self._made is None:
            raise EngineError(f"the sampler {self.server_id} has no model: call initialize before")
        return self._made

    @property
    def _llm(self) -> LLM:
        return self._engine.llm

    def _run[T](self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a call of the engine in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call)


class _OpenSample:
    """The calls of one `sample`, which its caller may cancel at any time."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._calls: list[OfflineCall] = []
        self._is_cancelled = False

    def add(self, ids: list[int], config: Any) -> OfflineCall:
        """Begin the call of one prompt. Raises RequestError."""
        call = self._engine.add_prompt(ids, config)
        self._calls.append(call)
        if self._is_cancelled:
            self._engine.abort([call])
        return call

    def cancel(self) -> None:
        """Abort the calls, and those that are still to come."""
        self._is_cancelled = True
        self._engine.abort(self._calls)


def _prompt(request: Any) -> Any:
    """The prompt of a request, which may be the prompt itself."""
    return getattr(request, "prompt", request)


def _config(request: Any) -> SimpleNamespace:
    """The parameters of a request by the names of `RolloutConfig`. Raises RequestError."""
    params = getattr(request, "sampling_params", None)
    if params is None:
        params = importlib.import_module(SAMPLER).SamplingParams()
    for name in _NOT_HERE:
        if getattr(params, name, None):
            raise RequestError(f"{name} is not supported: leave it out", param=name)
    return SimpleNamespace(
        max_tokens_to_generate=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        eos_tokens=None,
        return_logprobs=params.return_logprobs,
    )


def _logprobs(output: RequestOutput) -> np.ndarray | None:
    if output.outputs[0].logprobs is None:
        return None
    return logprobs_of(output)


def _error_info(error: Exception) -> Any:
    """The error of one answer."""
    kind = importlib.import_module(DATATYPES).ErrorInfo
    return kind(error_type=type(error).__name__, message=str(error))
