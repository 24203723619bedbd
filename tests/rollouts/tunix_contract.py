"""The part of Tunix's rollouts that an engine meets, as recorded from google-tunix 0.1.7."""

import abc
import dataclasses
import inspect
from typing import Any

CONTRACT: dict[str, list[str]] = {
    "generate": ["prompts", "rollout_config", "kwargs"],
    "get_per_token_logps": ["prompt_tokens", "completion_tokens"],
    "update_params": ["params", "filter_types"],
    "pad_id": [],
    "eos_id": [],
    "model": [],
}
"""The abstract methods and their parameters. The constructor takes any names."""

OUTPUT = ["text", "logits", "tokens", "left_padded_prompt_tokens", "logprobs"]
CONFIG: dict[str, Any] = {
    "max_tokens_to_generate": 64,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": None,
    "seed": None,
    "max_prompt_length": 64,
    "eos_tokens": None,
    "return_logprobs": False,
}
"""The fields of `RolloutConfig` that are read here, and their defaults."""

CONSTRUCTOR = ["rollout_actor", "tokenizer", "mesh", "rollout_config"]
"""The arguments of `RLCluster` for an engine of the user."""


class BaseRollout(abc.ABC):
    """A base class with these methods."""

    @abc.abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any: ...

    @abc.abstractmethod
    def update_params(self, params: Any, filter_types: Any = None) -> None: ...

    @abc.abstractmethod
    def pad_id(self) -> int: ...

    @abc.abstractmethod
    def eos_id(self) -> int: ...

    @abc.abstractmethod
    def model(self) -> Any: ...


RolloutOutput = dataclasses.make_dataclass("RolloutOutput", OUTPUT)
RolloutConfig = dataclasses.make_dataclass(
    "RolloutConfig",
    [(name, Any, dataclasses.field(default=value)) for name, value in CONFIG.items()],
)


def contract_of(base: Any) -> dict[str, list[str]]:
    """The abstract methods of a base class and their parameters, without the constructor."""
    names = base.__abstractmethods__ - {"__init__"}
    return {name: list(inspect.signature(getattr(base, name)).parameters)[1:] for name in names}
