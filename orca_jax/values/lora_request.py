"""Adapters of requests: as a caller names them, and as the engine has loaded them."""

from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.values.checks import adapter_name_fault
from orca_jax.values.errors import RequestError
from orca_jax.values.request import NamesChecked, require


class Adapter(NamedTuple):
    """A low-rank adapter of the model. `key` is a digest of its content: equal keys mean equal results."""

    name: str
    key: str


@dataclass(frozen=True)
class LoRARequest(NamesChecked):
    """An adapter for the requests of a call of `LLM`, with two of the fields of vLLM's class.

    Raises:
        RequestError: a value is not a string, or is empty, or the name has a comma; `param` names it.
    """

    lora_name: str
    lora_path: str  # directory written by PEFT; read at the first use of the name

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            require(
                isinstance(value, str) and bool(value), name, "a string that is not empty", value
            )
        if fault := adapter_name_fault(self.lora_name):
            raise RequestError(f"lora_name {fault}", param="lora_name")
