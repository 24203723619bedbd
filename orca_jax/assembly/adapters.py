"""Adapters of an engine: read from directories in any thread, and loaded at the start."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.engine import Engine
from orca_jax.exec.host import trim_heap
from orca_jax.model.lora.peft_config import CONFIG, config_bytes
from orca_jax.values.config import DType, LoraConfig, ModelConfig
from orca_jax.values.errors import ConfigError, OrcaError, RequestError
from orca_jax.values.lora_request import Adapter, AdapterTree

_TOY_NUMBERS = 10_000

logger = logging.getLogger(__name__)


class ReadAdapter(NamedTuple):
    """An adapter on the host, its weights for the executor, and what its reader should know, or an empty text."""

    adapter: Adapter
    weights: Any
    note: str = ""

    def add_to(self, engine: Engine) -> None:
        """Make the adapter available to new requests. Raises RequestError."""
        engine.add_adapter(self.adapter, self.weights)
        if self.note:
            logger.warning("adapter %s: %s", self.adapter.name, self.note)


AdapterReader = Callable[[str, str | AdapterTree], ReadAdapter]
"""`(name, path or tree) -> adapter`, for any thread. Raises RequestError; `param` is "lora_path" or "params"."""


def adapter_reader(
    model: ModelConfig, lora: LoraConfig | None, dtype: DType
) -> AdapterReader | None:
    """The reader of adapters for a model as its devices hold it; None if the engine has none."""
    if lora is None:
        return None
    return partial(_read, model, lora, dtype)


def load_first(
    engine: Engine, paths: Mapping[str, str], reader: AdapterReader | None
) -> AdapterReader | None:
    """Load adapters by name, and return the reader. Raises ConfigError; `param` is "lora_modules"."""
    for name, path in paths.items():
        assert reader is not None, "the settings of adapters were checked"
        try:
            reader(name, path).add_to(engine)
        except OrcaError as error:
            raise ConfigError(f"lora_modules, {name}: {error}", param="lora_modules") from None
    return reader


def _read(
    model: ModelConfig, lora: LoraConfig, dtype: DType, name: str, source: str | AdapterTree
) -> ReadAdapter:
    from orca_jax.model.lora.peft_files import read_adapter
    from orca_jax.model.lora.trees import read_tree

    param = "lora_path"
    try:
        if isinstance(source, AdapterTree):
            param = "params"
            found = read_tree(source, model, lora, dtype)
        else:
            found = read_adapter(Path(source), model, lora, dtype)
    except ConfigError as error:
        raise RequestError(error.message, param=param) from None
    trim_heap()
    parts = " and ".join(found.left_out)
    note = ""
    if parts:
        note = f"its part for {parts} is left out, since this engine runs the model for texts alone"
    return ReadAdapter(Adapter(name, found.digest), found.values, note)


def read_toy_adapter(name: str, source: str | AdapterTree) -> ReadAdapter:
    """The reader for the toy: the number of an adapter follows from its configuration file, or from its tree."""
    try:
        content = repr(source).encode()
        if isinstance(source, str):
            content = config_bytes(Path(source))
    except OSError as error:
        message = f"{source}: {CONFIG} cannot be read: {error.strerror or error}"
        raise RequestError(message, param="lora_path") from None
    digest = hashlib.sha256(content).hexdigest()
    return ReadAdapter(Adapter(name, digest), 1 + int(digest[:8], 16) % _TOY_NUMBERS)
