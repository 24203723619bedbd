"""The tiers of the KV cache outside of the devices, from the settings."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orca_jax.assembly.choices import TierChoices
from orca_jax.engine import Engine
from orca_jax.exec.tiers.base import Tier
from orca_jax.exec.tiers.files import FileTier
from orca_jax.exec.tiers.memory import MemoryTier
from orca_jax.helpers.bundled import code_digest, is_preset
from orca_jax.model.weight_files import files_digest
from orca_jax.sched.prefixes.outer import OuterPages
from orca_jax.values.config import ExecutorConfig
from orca_jax.values.errors import ConfigError, system_message

if TYPE_CHECKING:
    from orca_jax.assembly.executor import PlacedModel
    from orca_jax.exec.executor import JaxExecutor


def open_tiers(
    choices: TierChoices,
    source: str,
    seed: int,
    placed: "PlacedModel",
    resolved: ExecutorConfig,
) -> list[Tier]:
    """Open the tiers of the settings, the quickest first, before weights are read.

    Args:
        choices: the choices of the settings.
        source: the directory, file or preset of the model.
        seed: of random weights.
        placed: the model on its devices.
        resolved: the shapes.

    Raises:
        ConfigError: a directory cannot be used; `param` names the setting.
    """
    tiers: list[Tier] = []
    if choices.host_memory is not None:
        tiers.append(MemoryTier(choices.host_memory))
    if choices.disk is not None:
        identity = _identity(source, seed, placed, resolved)
        files = FileTier(choices.disk, identity, choices.disk_size)
        files.begin_scan()
        tiers.append(files)
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
    from orca_jax.exec.tiers.device import DeviceTier

    tier = DeviceTier(executor.stages, tiers)
    for each in tiers:
        if isinstance(each, FileTier):
            each.await_scan()
    # large launches take the least time for a token, and long contexts take more
    of_token = min(taken / size for size, taken in seconds.items())
    reuse.outer = OuterPages(engine.pool.kv, tier, lambda tokens: tokens * of_token)


def _identity(source: str, seed: int, placed: "PlacedModel", resolved: ExecutorConfig) -> bytes:
    """The digest of all that the numbers of a page follow from, beside tokens, salt and adapter."""
    # what changes no number, or the numbers of no other page
    numbers = replace(
        resolved,
        tensor_parallel_size=1,
        buckets=(),
        num_rows=0,
        num_drafts=0,
        lora=None,
        compile_cache=None,
        strict_compile=False,
        copies_blocks=False,
        cache=replace(resolved.cache, num_blocks=(), num_states=0),
    )
    files = ""
    if not is_preset(source):
        try:
            files = files_digest(Path(source))
        except OSError as error:
            raise ConfigError(f"model: {system_message(error)}", param="model") from None
    drawn = seed if placed.weights.is_random else None
    device = placed.devices[0]
    kind = (device.platform, device.device_kind, placed.products)
    facts = (code_digest(), placed.config, numbers, kind, drawn, files)
    return hashlib.sha256(repr(facts).encode()).digest()
