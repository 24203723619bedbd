"""Rollouts for Tunix: `orca_rollout` is a rollout engine of its `ClusterConfig`, with an `LLM` in the same process.

Tunix is imported when `orca_rollout` is called. It is no dependency of this package.
"""

import importlib
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from orca_jax.assembly.weights import rank_of
from orca_jax.llm.rollout_engine import RolloutEngine, logprobs_of, wants_logprobs
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import SamplingParams

BASE = "tunix.rl.rollout.base_rollout"


def orca_rollout(
    model: str, *, filters: bool = False, lora_alpha: float | None = None, **settings: Any
) -> "partial[Any]":
    """The engine for `ClusterConfig(rollout_engine=...)`: a partial of a subclass of Tunix's `BaseRollout`.

    Args:
        model: a directory with the config.json and the tokenizer of the model that Tunix trains.
        filters: take top_p and top_k of Tunix's configuration. Its trainer computes log probabilities over all
            tokens, at the temperature. Those of a filtered draw are larger.
        lora_alpha: the `alpha` of qwix's `LoraProvider`, for an actor with adapters; the tree does not show it.
        settings: the settings of `LLM`. With `load_format="dummy"` no weights are read before those of Tunix. The log
            probabilities are those of the sampled distribution, unless `logprobs_mode` names others.

    Raises:
        ConfigError: Tunix is not installed.
    """
    kind: Any = rollout_class()
    settings = {"logprobs_mode": "processed_logprobs", **settings}
    return partial(kind, model=model, filters=filters, lora_alpha=lora_alpha, settings=settings)


@cache
def rollout_class() -> type[Any]:
    """The subclass of `BaseRollout`. Raises ConfigError if Tunix is not installed."""
    try:
        base = importlib.import_module(BASE)
    except ModuleNotFoundError as error:
        message = f"Tunix cannot be imported: {error}; install it with pip install google-tunix"
        raise ConfigError(message, param="rollout_engine") from None

    return type("OrcaRollout", (_Rollout, base.BaseRollout), {"output_class": base.RolloutOutput})


class _Rollout(RolloutEngine):
    """The methods of `BaseRollout`.

    Args:
        model: see `orca_rollout`.
        filters: see `orca_rollout`.
        lora_alpha: see `orca_rollout`.
        settings: see `orca_rollout`.
        rollout_actor: the model of Tunix, whose parameters become the weights; None for the weights of `model`.
        tokenizer: the tokenizer of Tunix; None for that of `model`.
        rollout_config: settings of Tunix; each call of `generate` has its own.
        mesh: the mesh of Tunix; the engine has devices by its own settings.

    Raises:
        ConfigError: the actor has adapters, and there is no `lora_alpha`.
    """

    output_class: Any

    def __init__(
        self,
        *,
        model: str,
        filters: bool,
        lora_alpha: float | None,
        settings: dict[str, Any],
        rollout_actor: Any = None,
        tokenizer: Any = None,
        rollout_config: Any = None,
        mesh: Any = None,
    ) -> None:
        params = {} if rollout_actor is None else nnx.state(rollout_actor, nnx.Param)
        super().__init__(
            model=model,
            filters=filters,
            lora_alpha=lora_alpha,
            rank=rank_of(params),
            tokenizer=tokenizer,
            settings=settings,
        )
        if rollout_actor is not None:
            self.update_params(params)

    def generate(self, prompts: str | list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Sample one text for each prompt, with the log probabilities of its tokens from the same pass.

        The log probabilities are those of the sampled distribution, at the temperature of the configuration. The first
        prompt has the seed of the configuration, and each further prompt the next seed. So equal prompts get different
        texts.

        Raises:
            RequestError: an argument is not supported, a prompt is longer than `max_prompt_length`, or the
                configuration filters tokens without `filters`.
        """
        if kwargs:
            raise RequestError(
                f"generate has no argument {next(iter(kwargs))}", param=next(iter(kwargs))
            )
        if isinstance(prompts, str):  # of one agent
            prompts = [prompts]
        ids = [self.encode(prompt) for prompt in prompts]
        width = rollout_config.max_prompt_length
        for index, each in enumerate(ids):
            if len(each) > width:
                message = f"prompt {index} has {len(each)} tokens, and max_prompt_length is {width}: raise it"
                raise RequestError(message, param="max_prompt_length")
        with jax.transfer_guard("allow"):
            params = self._params(rollout_config, len(ids))
            outputs = self.generate_ids(ids, params)
        texts = [output.outputs[0] for output in outputs]
        pad = self.pad_id()
        logprobs = None
        if wants_logprobs(rollout_config):
            logprobs = [logprobs_of(output) for output in outputs]
        return self.output_class(
            text=[self.decode(text.token_ids) for text in texts],
            logits=None,
            tokens=[np.array(text.token_ids, np.int32) for text in texts],
            left_padded_prompt_tokens=np.array(
                [[pad] * (width - len(each)) + each for each in ids], np.int32
            ),
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, completion_mask: Any = None
    ) -> jax.Array:
        """Log probabilities of the completions' tokens under the current weights, [B, C]; 0 for padding.

        Args:
            prompt_tokens: [B, P], padded on the left.
            completion_tokens: [B, C], padded on the right.
            completion_mask: [B, C], False for padding; None: the end of a row with the padding's id is padding, except
                for one end token.
        """
        with jax.transfer_guard("allow"):
            prompts = np.asarray(prompt_tokens)
            completions = np.asarray(completion_tokens)
            mask = None if completion_mask is None else np.asarray(completion_mask)
            pad = self.pad_id()
            rows = []
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
                begin = len(prompt) - 1
                if (prompt != pad).any():
                    begin = int(np.argmax(prompt != pad))
                size = _used(completion, pad, self.eos_id())
                if mask is not None:
                    size = int(mask[index].sum())
                rows.append((prompt[begin:].tolist(), completion[:size].tolist()))
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
            whole = [prompt + rest for prompt, rest in rows]
            outputs = self.generate_ids(whole, params)
            scores = np.zeros(completions.shape, np.float32)
            for index, ((_, rest), output) in enumerate(zip(rows, outputs, strict=True)):
                known = output.prompt_logprobs or ()
                pairs = zip(rest, known[len(known) - len(rest) :], strict=True)
                scores[index, : len(rest)] = [
                    one[token_id].logprob for token_id, one in pairs if one is not None
                ]
            return jnp.asarray(scores)

    def model(self) -> None:
        """None, as for other engines that are not a module of Tunix."""


def _used(completion: np.ndarray, pad: int, eos: int) -> int:
    """The tokens before the padding at the end; one end token remains if it is the padding's id, too."""
    others = np.flatnonzero(completion != pad)
    size = int(others[-1]) + 1 if len(others) else 0
    if pad == eos:
        return min(size + 1, len(completion))
    return size
