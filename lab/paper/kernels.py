"""Costs of the paper's systems from measured kernels of an A100 of 80 GB, with nothing fitted.

The paper's card is the one of 40 GB: the same processor, with 1.555 instead of 2.039 TB/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.paper.gpt import MODELS
from orca_jax.model.describe import read_model_config
from orca_jax.sim.cost import WorkCounts
from orca_jax.tools.plan.kernels import Kernels
from orca_jax.tools.plan.tables import TablesCost, TableSettings, tables_cost

PAPER_BANDWIDTH = 1.555e12


class KernelSource(NamedTuple):
    """The tables of a prediction, and the assumptions about the paper's engine.

    Attributes:
        folder: the place of the tables.
        source: the engine with the kernels.
        attention: "request", ORCA's launches of attention are one for each request, or "fused".
        sums: "nccl", as the paper says, or "own".
        bandwidth: bytes per second of the card; 0: the card that was measured.
        host: seconds of the host for each iteration.
        card: the first part of the tables' names.
    """

    folder: Path
    source: str = "vllm"
    attention: str = "request"
    sums: str = "nccl"
    bandwidth: float = PAPER_BANDWIDTH
    host: float = 0.0
    card: str = "a100_sxm"


@dataclass(frozen=True)
class KernelCost:
    """The cost of a stage from measured kernels."""

    inner: TablesCost
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """Seconds on each stage."""
        return self.inner.stages(work, num_stages)

    def filled(self, work: WorkCounts, places: int, num_stages: int) -> Sequence[float]:
        """Seconds on each stage, if a batch has all its places taken by members like its own."""
        factor = places / work.members
        counts = {name: round(factor * getattr(work, name)) for name in _BY_MEMBER}
        return self.stages(work._replace(**counts), num_stages)


_BY_MEMBER = (
    "chunk_tokens", "chunk_pairs", "chunk_context", "increments", "context", "draws", "members",
)  # fmt: skip


def kernel_cost(model: str, source: KernelSource, *, is_batched: bool) -> KernelCost:
    """The cost of one of the paper's models. FasterTransformer's attention is batched.

    Raises:
        ConfigError: a table is missing or wrong; `param` is "cost".
    """
    attention = "fused" if is_batched else source.attention
    found = _table_cost(model, source._replace(attention=attention, host=0.0))
    return KernelCost(found, source.host)


@cache
def _table_cost(model: str, source: KernelSource) -> TablesCost:
    settings = TableSettings(
        card=source.card,
        source=source.source,
        model=f"preset:gpt3-{model.lower()}",
        tensor=MODELS[model].num_tensor,
        attention=source.attention,
        sums=source.sums,
        bandwidth=source.bandwidth,
    )
    kernels = _read(source.folder, source.card, source.source)
    return tables_cost(kernels, settings, read_model_config(settings.model))


@cache
def _read(folder: Path, card: str, source: str) -> Kernels:
    return Kernels(folder, card, source)
