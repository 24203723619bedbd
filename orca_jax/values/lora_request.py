"""Adapters of requests: as a caller names them, and as the engine has loaded them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from orca_jax.values.checks import adapter_name_fault
from orca_jax.values.errors import RequestError
from orca_jax.values.request import NamesChecked, require


class Adapter(NamedTuple):
    """A low-rank adapter of the model. `key` is a digest of its content: equal keys mean equal results."""

    name: str
    key: str


class AdapterTree(NamedTuple):
    """An adapter in memory, as a trainer has it."""

    params: Any  # a state or module of `flax.nnx`, or nested dicts
    alpha: float  # the factor on both matrices is `alpha` / rank


@dataclass(frozen=True)
class LoRARequest(NamesChecked):
    """An adapter for the requests of a call of `LLM`, with two of the fields of vLLM's class.

    Raises:
        RequestError: a value is not a string, or the name is empty or has a comma; `param` names it.
    """

    lora_name: str
    # directory written by PEFT, read at the first use of the name; empty for an adapter that is loaded
    lora_path: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("lora_name", "a string that is not empty"), ("lora_path", "a string")):
            value = getattr(self, name)
            is_right = isinstance(value, str) and (bool(value) or name == "lora_path")
            require(is_right, name, kind, value)
        if fault := adapter_name_fault(self.lora_name):
            raise RequestError(f"lora_name {fault}", param="lora_name")
