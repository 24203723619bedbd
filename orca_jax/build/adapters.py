"""Adapters of an engine: read from directories in any thread, and loaded at the start."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.config import EngineConfig, ExecutorConfig, ModelConfig
from orca_jax.engine import Engine
from orca_jax.errors import CheckpointError, ConfigError, OrcaError, RequestError
from orca_jax.request import Adapter

_TOY_NUMBERS = 10_000


class ReadAdapter(NamedTuple):
    """An adapter on the host, and its weights for the executor."""

    adapter: Adapter
    weights: Any


AdapterReader = Callable[[str, str], ReadAdapter]
"""`(name, path) -> adapter`, for any thread. Raises RequestError; `param` is "lora_path"."""


def adapter_reader(model: ModelConfig, config: ExecutorConfig) -> AdapterReader | None:
    """The reader of adapters for a model as its devices hold it; None if the engine has none."""
    return None if config.lora is None else partial(_read, model, config)


def toy_adapter_reader(config: EngineConfig) -> AdapterReader | None:
    """The reader for the toy: the number of an adapter follows from its configuration file."""
    return _read_toy if config.enable_lora else None


def load_first(engine: Engine, config: EngineConfig, reader: AdapterReader | None) -> AdapterReader | None:
    """Load the adapters of the settings, and return the reader. Raises ConfigError; `param` is "lora_modules"."""
    for name, path in config.lora_paths.items():
        assert reader is not None, "the settings of adapters were checked"
        try:
            engine.add_adapter(*reader(name, path))
        except OrcaError as error:
            raise ConfigError(f"lora_modules, {name}: {error}", param="lora_modules") from None
    return reader


def _read(model: ModelConfig, config: ExecutorConfig, name: str, path: str) -> ReadAdapter:
    from orca_jax.model.lora.peft_files import read_adapter

    assert config.lora is not None, "there are adapters"
    try:
        found = read_adapter(Path(path), model, config.lora, config.dtype)
    except CheckpointError as error:
        raise RequestError(error.message, param="lora_path") from None
    return ReadAdapter(Adapter(name, found.digest), found.values)


def _read_toy(name: str, path: str) -> ReadAdapter:
    file = Path(path) / "adapter_config.json"
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}", param="lora_path") from None
    return ReadAdapter(Adapter(name, digest), 1 + int(digest[:8], 16) % _TOY_NUMBERS)
