"""The tiers of the KV cache outside of the devices, from the settings."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orca_jax.engine import Engine
from orca_jax.helpers.bundled import code_digest, is_preset
from orca_jax.sched.outer import OuterPages
from orca_jax.tiers.base import Tier
from orca_jax.tiers.files import FileTier
from orca_jax.tiers.memory import MemoryTier
from orca_jax.values.config import KV_DISK_GIB, EngineConfig, ExecutorConfig
from orca_jax.values.errors import ConfigError, system_message

if TYPE_CHECKING:
    from orca_jax.assembly.executor import PlacedModel
    from orca_jax.exec.executor import JaxExecutor

_MOST_FILES = 10_000  # of a model
_SAMPLE = 2**16  # bytes at both ends of a file of weights


def open_tiers(
    config: EngineConfig, source: str, placed: "PlacedModel", resolved: ExecutorConfig
) -> list[Tier]:
    """Open the tiers of the settings, the quickest first, before weights are read.

    Args:
        config: the settings.
        source: the directory, file or preset of the model.
        placed: the model on its devices.
        resolved: the shapes.

    Raises:
        ConfigError: a directory cannot be used; `param` names the setting.
    """
    tiers: list[Tier] = []
    if config.kv_host_memory is not None:
        tiers.append(MemoryTier(config.kv_host_memory))
    if config.kv_disk is not None:
        most = config.kv_disk_size or KV_DISK_GIB * 2**30
        tiers.append(FileTier(config.kv_disk, _identity(config, source, placed, resolved), most))
    return tiers


def attach_tiers(
    engine: Engine, executor: "JaxExecutor", tiers: list[Tier], seconds: Mapping[int, float]
) -> None:
    """Let an engine save and restore pages.

    Args:
        engine: its pool has a prefix cache.
        executor: all stages of the model are on devices of this process.
        tiers: see `open_tiers`; without one there is nothing to do.
        seconds: measured time of a launch of each size.
    """
    reuse = engine.pool.reuse
    if not tiers or reuse is None:
        return
    from orca_jax.exec.page_tier import DeviceTier

    tier = DeviceTier(executor.stages, tiers)
    for each in tiers:
        if isinstance(each, FileTier):
            tier.store.run_soon(each.scan)
    # large launches take the least time for a token, and long contexts take more
    of_token = min(taken / size for size, taken in seconds.items())
    reuse.outer = OuterPages(engine.pool.kv, tier, lambda tokens: tokens * of_token)


def _identity(
    config: EngineConfig, source: str, placed: "PlacedModel", resolved: ExecutorConfig
) -> bytes:
    """The digest of all that the numbers of a page follow from, beside tokens, salt and adapter."""
    cache = resolved.cache
    facts = (
        code_digest(),
        placed.config,
        placed.weights.dtype,
        placed.products,
        (placed.platform.name, placed.devices[0].device_kind),
        (resolved.attention_implementation, resolved.activation_bits, resolved.has_library),
        (resolved.pipeline_parallel_size, resolved.max_model_len),
        (cache.groups, cache.page_size, cache.dtype, cache.layout),
        config.seed if placed.weights.is_random else None,
        [] if is_preset(source) else list(_files(Path(source))),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def _files(source: Path) -> Iterator[tuple[str, int, int, str]]:
    """The files of a model: name, size, time of the last change, and a digest of both ends. Raises ConfigError."""
    files = [source]
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.is_file())
    if len(files) > _MOST_FILES:
        message = f"kv_disk: {source} has more than {_MOST_FILES} files; leave kv_disk out"
        raise ConfigError(message, param="kv_disk")
    for path in files:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest = hashlib.sha256(file.read(_SAMPLE))
                file.seek(max(0, status.st_size - _SAMPLE))
                digest.update(file.read(_SAMPLE))
        except OSError as error:
            raise ConfigError(f"model: {system_message(error)}", param="model") from None
        name = path.relative_to(source).as_posix()
        yield name, status.st_size, status.st_mtime_ns, digest.hexdigest()
