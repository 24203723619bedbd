"""An `LLM` as trainers use it: their tokenizer, their parameters of a rollout, and their trees of weights."""

from collections.abc import Sequence
from itertools import chain
from os import PathLike
from typing import Any

import jax
import numpy as np

from orca_jax.assembly.weights import split_adapters
from orca_jax.llm.offline import LLM
from orca_jax.llm.open_requests import OfflineCall
from orca_jax.llm.outputs import RequestOutput
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.lora_request import LoRARequest
from orca_jax.values.request import SamplingParams, candidate_seed

_ADAPTER = "actor"
_NO_FILTER = {"top_p": (1.0,), "top_k": (0, -1)}


class RolloutEngine:
    """The engine of a rollout.

    Args:
        model: see `orca_rollout`.
        filters: see `orca_rollout`.
        lora_alpha: see `orca_rollout`.
        rank: the largest rank of adapters; 0 without them.
        tokenizer: the trainer's; None for the tokenizer of `model`.
        settings: see `orca_rollout`.

    Raises:
        ConfigError: there are adapters, and there is no `lora_alpha`.
    """

    def __init__(
        self,
        *,
        model: str,
        filters: bool,
        lora_alpha: float | None,
        rank: int,
        tokenizer: Any,
        settings: dict[str, Any],
    ) -> None:
        self._alpha = lora_alpha
        self._adapter: LoRARequest | None = None
        if rank:
            if lora_alpha is None:
                message = (
                    "the actor has adapters: give orca_rollout the lora_alpha of its LoraProvider"
                )
                raise ConfigError(message, param="lora_alpha")
            settings = {"enable_lora": True, "max_lora_rank": rank, **settings}
        self.llm = LLM(model, **settings)
        self._filters = filters
        self._tokenizer = tokenizer

    def generate_ids(self, prompts: Sequence[list[int]], params: Any) -> list[RequestOutput]:
        """The outputs of all prompts, by the weights and the adapter of the trainer."""
        return self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)

    def add_prompt(self, ids: list[int], config: Any) -> OfflineCall:
        """Begin the call of one prompt. Raises RequestError."""
        params = self._params(config, 1)
        return self.llm._add([ids], params, None, lora_request=self._adapter)[0]

    def wait(self, call: OfflineCall) -> list[RequestOutput]:
        """The outputs of a call, when they have ended."""
        return list(self.llm._drain(call))

    def abort(self, calls: Sequence[OfflineCall]) -> None:
        """End calls with the reason "abort"."""
        self.llm._turns.abort(chain.from_iterable(call.candidates for call in calls))

    def weight_shapes(self) -> Any:
        """A tree of the sharded shapes of all weights. Raises ConfigError if they cannot be replaced."""
        shapes = self.llm._built.weight_shapes
        if shapes is None:
            raise ConfigError("the weights of this model cannot be replaced", param="model")
        return shapes()

    def check_params(self, params: Any) -> None:
        """Refuse weights that do not fit. Those of adapters are checked when they are used. Raises ConfigError."""
        weights, adapter = _split(params)
        if weights or not adapter:
            self.llm._built.prepare_update(weights)

    def update_params(
        self,
        params: Any,
        filter_types: tuple[Any, ...] | None = None,
        version: int | None = None,
    ) -> None:
        """Replace the weights, the adapter, or both, by those of Tunix's model. Adapters alone leave the weights.

        Raises:
            CheckpointError: the parameters do not fit; the weights are unchanged.
            RequestError: the adapter does not fit.
        """
        weights, adapter = _split(params)
        # Tunix forbids transfers in `sync_weights`, and this is one
        with jax.transfer_guard("allow"):
            if weights or not adapter:
                self.llm.update_params(weights, version)
            if adapter:
                assert self._alpha is not None, "the actor had no adapters at the start"
                self.llm.update_lora(_ADAPTER, adapter, self._alpha)
                self._adapter = LoRARequest(_ADAPTER)

    def pad_id(self) -> int:
        """The id of padding."""
        if self._tokenizer is None:
            return self.eos_id()
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The end token."""
        if self._tokenizer is not None:
            return int(self._tokenizer.eos_id())
        return self.llm._built.model_config.eos_token_ids[0]

    def _ends(self) -> tuple[int, ...]:
        """The end token, if there is one."""
        if self._tokenizer is None:
            return self.llm._built.model_config.eos_token_ids[:1]
        return (self.eos_id(),)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a text, with the beginning of a text if the tokenizer has one."""
        if self._tokenizer is None:
            return self.llm.tokenizer.encode(prompt, True)
        ids = [int(token) for token in self._tokenizer.encode(prompt)]
        begin = self._tokenizer.bos_id()
        if begin in (None, 0, *ids[:1]):
            return ids
        return [int(begin), *ids]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """The ids of a conversation, by the chat template of the model. Raises RequestError."""
        tokenizer = self.llm.get_tokenizer()
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        if self._tokenizer is None:
            return self.llm.tokenizer.decode(ids)
        return str(self._tokenizer.decode(list(ids)))

    def _params(self, config: Any, count: int) -> list[SamplingParams]:
        """The parameters of each prompt."""
        fields: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "stop_token_ids": tuple(config.eos_tokens or self._ends()),
            "ignore_eos": True,
        }
        for name in ("top_p", "top_k"):
            value = getattr(config, name)
            if value is None:
                continue
            if value not in _NO_FILTER[name] and not self._filters:
                message = (
                    f"{name} {value} leaves tokens out, and Tunix's trainer computes log probabilities over all "
                    f"tokens: leave {name} out, or give orca_rollout filters=True"
                )
                raise RequestError(message, param=name)
            fields[name] = value
        if wants_logprobs(config):
            fields["logprobs"] = 0
        if config.seed is None:
            return [SamplingParams(**fields)] * count
        seed = int(np.asarray(config.seed).ravel()[-1])
        return [
            SamplingParams(**fields, seed=candidate_seed(seed, index)) for index in range(count)
        ]


def _split(params: Any) -> tuple[Any, dict[str, Any]]:
    """The weights and the adapter of a tree. A path names a checkpoint of weights."""
    if isinstance(params, str | PathLike):
        return params, {}
    return split_adapters(params)


def wants_logprobs(config: Any) -> bool:
    """True unless the configuration of a later Tunix asks for none."""
    return bool(getattr(config, "return_logprobs", True))


def logprobs_of(output: RequestOutput) -> np.ndarray:
    """The log probabilities of the tokens of a text."""
    (completion,) = output.outputs
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return np.array([one[token_id].logprob for token_id, one in pairs], np.float32)
