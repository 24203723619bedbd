"""Costs of the paper's systems from measured kernels of an A100 of 80 GB, with nothing fitted.

The paper's card is the one of 40 GB: the same processor, with 1.555 instead of 2.039 TB/s.

ORCA's engine is the one of the paper's text. Sums over devices are NCCL's. Attention is one launch with the thread
blocks of all requests (section 5). Keys and values of each request have places of their own (section 3.2), and the
text knows no joined kernel that writes them: each request has a kernel in each layer, with the time of the shortest
kernel of the tables. FasterTransformer's batches have one shape, and its attention writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.paper.gpt import MODELS
from orca_jax.model.describe import read_model_config
from orca_jax.sim.cost import WorkCounts
from orca_jax.tools.plan.kernels import Kernels
from orca_jax.tools.plan.tables import TablesCost, TableSettings, tables_cost

PAPER_BANDWIDTH = 1.555e12
TILE = 128
"""Tokens of a tile of a product. In the tables of the A100 most large ones take as long with 160 or 192 tokens as with
256, and lines between tokens are too short: 9 % with 160 tokens that are left out."""


class KernelSource(NamedTuple):
    """The tables of a prediction, and the assumptions about the paper's engine.

    Attributes:
        folder: the place of the tables.
        source: the engine with the kernels.
        attention: "token", ORCA's attention is one launch with a kernel for both phases, which takes each token of a
            prompt as an increment; "fused", two launches; or "request", one for each request.
        writes: kernels of a layer under ORCA that write the keys and values of a request.
        sums: "nccl", as the paper says, or "own".
        bandwidth: bytes per second of the card; 0: the card that was measured.
        tile: tokens that a product takes together.
        host: seconds of the host for each iteration.
        card: the first part of the tables' names.
    """

    folder: Path
    source: str = "vllm"
    attention: str = "token"
    writes: int = 1
    sums: str = "nccl"
    bandwidth: float = PAPER_BANDWIDTH
    tile: int = TILE
    host: float = 0.0
    card: str = "a100_sxm"


@dataclass(frozen=True)
class KernelCost:
    """The cost of a stage from measured kernels."""

    inner: TablesCost
    host: float = 0.0
    request: float = 0.0  # seconds of all layers for each request
    is_by_token: bool = False  # tokens of prompts have the attention of increments
    buckets: tuple[int, ...] = ()
    _known: dict[tuple[WorkCounts, int], Sequence[float]] = field(default_factory=dict, repr=False)

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """Seconds on each stage."""
        if work.members > 1:
            return self._stages(work, num_stages)
        key = (work, num_stages)
        if key not in self._known:  # of one request there are few different works
            self._known[key] = self._stages(work, num_stages)
        return self._known[key]

    def _stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        own = self.request * work.members / num_stages
        if self.is_by_token:
            work = _as_increments(work)
        return [own + seconds for seconds in self.inner.stages(work, num_stages)]

    def filled(self, work: WorkCounts, places: int, num_stages: int) -> Sequence[float]:
        """Seconds on each stage, if a batch has all its places taken by members like its own."""
        factor = places / work.members
        counts = {name: round(factor * getattr(work, name)) for name in _BY_MEMBER}
        return self.stages(work._replace(**counts), num_stages)


def _as_increments(work: WorkCounts) -> WorkCounts:
    """The same tokens, all with attention as increments have it."""
    return work._replace(
        chunk_tokens=0,
        chunk_pairs=0,
        chunk_context=0,
        increments=work.num_tokens,
        context=work.pairs,
    )


_BY_MEMBER = (
    "chunk_tokens", "chunk_pairs", "chunk_context", "increments", "context", "draws", "members",
)  # fmt: skip


def kernel_cost(model: str, source: KernelSource, *, is_batched: bool) -> KernelCost:
    """The cost of one of the paper's models. FasterTransformer's attention is batched.

    Raises:
        ConfigError: a table is missing or wrong; `param` is "cost".
    """
    if is_batched:
        source = source._replace(attention="fused", writes=0)
    return cost_with(f"preset:gpt3-{model.lower()}", MODELS[model].num_tensor, source)


def cost_with(model: str, tensor: int, source: KernelSource) -> KernelCost:
    """The cost of a model, by its flag, on stages of some devices. Raises ConfigError as `kernel_cost` does."""
    found = _table_cost(model, tensor, source._replace(writes=0, host=0.0))
    is_by_token = source.attention == "token"
    request = source.writes * found.least * found.model.num_layers
    return KernelCost(found, source.host, request, is_by_token)


@cache
def _table_cost(model: str, tensor: int, source: KernelSource) -> TablesCost:
    settings = TableSettings(
        card=source.card,
        source=source.source,
        model=model,
        tensor=tensor,
        attention="request" if source.attention == "request" else "fused",
        sums=source.sums,
        bandwidth=source.bandwidth,
        tile=source.tile,
    )
    kernels = _read(source.folder, source.card, source.source)
    return tables_cost(kernels, settings, read_model_config(settings.model))


@cache
def _read(folder: Path, card: str, source: str) -> Kernels:
    return Kernels(folder, card, source)
