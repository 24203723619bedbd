"""The adapters of an `LLM`: loaded at the first use of a name."""

import threading
from collections.abc import Sequence

from orca_jax.assembly.adapters import ReadAdapter
from orca_jax.assembly.built import Built
from orca_jax.llm.arguments import Loras, check_same_adapter, lora_for_each
from orca_jax.llm.turns import Turns
from orca_jax.values.errors import RequestError
from orca_jax.values.lora_request import AdapterTree, LoRARequest

_IN_MEMORY = "the matrices of update_lora"


class LoadedAdapters:
    """Loads adapters into an engine, and remembers their paths. An adapter is read beside the engine's turns.

    Args:
        built: the engine and the reader of adapters.
        turns: the turns of the engine.
    """

    def __init__(self, built: Built, turns: Turns) -> None:
        self._built = built
        self._turns = turns
        self._lock = threading.Lock()
        self._paths = dict(built.timeline_header.config.lora_paths)

    def names(self, requests: Loras, count: int) -> Sequence[str | None]:
        """The name of the adapter of each of `count` prompts; None for the model itself. Raises RequestError."""
        each = lora_for_each(requests, count)
        with self._lock:
            return [None if one is None else self._name(one) for one in each]

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises RequestError."""
        with self._lock:
            with self._turns.turn():
                self._built.engine.remove_adapter(name)
            self._paths.pop(name, None)

    def update(self, name: str, tree: AdapterTree) -> int:
        """Let a name stand for the adapter of a tree from now on. Returns the version. Raises RequestError."""
        LoRARequest(name)
        found = self._read(name, tree, "lora_name")
        with self._lock:
            with self._turns.turn():
                version = self._built.engine.replace_adapter(found.adapter, found.weights)
            self._paths[name] = _IN_MEMORY
        return version

    def _name(self, request: LoRARequest) -> str:
        name = request.lora_name
        if name not in self._paths:
            found = self._read(name, request.lora_path, "lora_request")
            with self._turns.turn():
                found.add_to(self._built.engine)
            self._paths[name] = request.lora_path
        check_same_adapter(request, self._paths[name])
        return name

    def _read(self, name: str, source: str | AdapterTree, param: str) -> ReadAdapter:
        read = self._built.read_adapter
        if read is None:
            raise RequestError(f"{param} needs an LLM created with enable_lora=True", param=param)
        if not source:
            raise RequestError(f"no adapter is loaded as {name!r}: give its lora_path", param=param)
        return read(name, source)
