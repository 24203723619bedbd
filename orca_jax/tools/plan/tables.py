"""Costs from measured kernels of a card: `--cost tables:DIR,card=a100_sxm,source=vllm,model=CONFIG`.

An iteration has the products of all layers, the attention of prompts and of increments, the sums over devices, and the
unembedding of drawn tokens, each from a table of `kernels.py`. What no table has counts by its bytes over the card's
published bandwidth: embeddings, norms, rotations, activations and logits. A layer has `PLAIN` such kernels, each at
least as long as the shortest one of the tables. Experts take the longer of their bytes and their operations. A stage of
a pipeline passes its vectors on by `hop` seconds and their bytes over `link`.

With `bandwidth` the card is another one of the same kind. A product takes longer by the ratio of its rooflines on both
cards, and attention by the time of its bytes. Sums keep their time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from orca_jax.model.describe import read_model_config
from orca_jax.sim.cost import WorkCounts
from orca_jax.tools.plan.accelerators import ACCELERATORS, Accelerator
from orca_jax.tools.plan.kernels import HeadsPlane, Kernels
from orca_jax.tools.plan.measured import Curve, read_values
from orca_jax.values.checks import short
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

TABLES = "tables:"
CARDS = {"a100_sxm": "a100-80", "h100_sxm": "h100", "h200_sxm": "h200"}
"""The published rates of the cards that were measured, by the first part of their files' names."""
_BYTES = 2  # of a number of activations, keys and values
_KINDS = {"": 2.0, "fp8": 1.0, "fp8_block": 1.0}
"""Bytes of a weight, by the kind of products."""
_HEAD_DIM = 128  # of the tables of attention
PLAIN = 5
"""Kernels of a layer that no table has: two norms, two sums or two writes of positions and cache, and an activation."""
_USAGE = (
    "tables:DIR,card=C,source=S,model=M, with kind=, tensor=, attention=fused or request, sums=own or nccl, host=, "
    "bandwidth=, tile=, link= and hop= as needed"
)


@dataclass(frozen=True)
class TableSettings:
    """What a flag says.

    Attributes:
        card: the first part of the files' names.
        source: the engine with these kernels, the last part of their names.
        model: a directory with a config.json, or preset:<name>.
        kind: the type of products: "" for bfloat16, "fp8" or "fp8_block".
        tensor: devices of a stage, which sum their results twice in a layer.
        attention: "fused", one launch for a phase, or "request", one for each request.
        sums: "own" for those of the source, or "nccl".
        host: seconds of the host for each iteration.
        bandwidth: bytes per second of the card's memory; 0: the card that was measured.
        tile: tokens that products take together, as their kernels have whole tiles; 1: linear between points.
        link: bytes per second to the next stage.
        hop: seconds to the next stage beside the bytes.
    """

    card: str = ""
    source: str = ""
    model: str = ""
    kind: str = ""
    tensor: int = 1
    attention: str = "fused"
    sums: str = "own"
    host: float = 0.0
    bandwidth: float = 0.0
    tile: int = 1
    link: float = 25e9
    hop: float = 0.0


class MeasuredProduct(NamedTuple):
    """A product of a device: its seconds by tokens, and the sizes of its matrix."""

    seconds: Curve
    outputs: float
    inputs: float


@dataclass
class TablesCost:
    """The sum of the measured kernels of an iteration."""

    settings: TableSettings
    model: ModelConfig
    card: Accelerator
    products: Sequence[MeasuredProduct]  # of a layer
    unembedding: MeasuredProduct
    prompts: HeadsPlane
    increments: HeadsPlane
    sums: Curve | None
    least: float  # seconds of the shortest kernel
    buckets: tuple[int, ...] = field(default=(), init=False)

    @property
    def host(self) -> float:
        """Seconds of the host for each iteration."""
        return self.settings.host

    @property
    def num_outside(self) -> int:
        """The number of looked up values outside of a table."""
        curves = [each.seconds for each in (*self.products, self.unembedding)]
        found = sum([curve.num_outside for curve in curves])
        found += self.prompts.num_outside + self.increments.num_outside
        return found if self.sums is None else found + self.sums.num_outside

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """An equal part of the layers on each stage, hops from all but the last, and there the unembedding."""
        num_tokens = work.num_tokens
        stream = num_tokens * self.model.embed_dim * _BYTES
        of_layer = sum([self._product(each, num_tokens) for each in self.products])
        of_layer += self._attention(work) + self._experts(num_tokens)
        of_layer += PLAIN * self.least + num_tokens * self._plain_bytes() / self._bandwidth
        if self.sums is not None:
            of_layer += 2 * self.sums.at(stream)
        found = [of_layer * self.model.num_layers / num_stages] * num_stages
        found[0] += 2 * stream / self._bandwidth
        for stage in range(num_stages - 1):
            found[stage] += self.settings.hop + stream / self.settings.link
        if work.draws:
            logits = work.draws * self.unembedding.outputs * _BYTES
            found[-1] += self._product(self.unembedding, work.draws) + logits / self._bandwidth
        return found

    @property
    def _bandwidth(self) -> float:
        return self.settings.bandwidth or self.card.bandwidth

    @property
    def _weight(self) -> float:
        """Bytes of a weight."""
        return _KINDS[self.settings.kind]

    @property
    def _flops(self) -> float:
        """Operations per second: half as many bytes, twice as many of them."""
        return self.card.flops * _BYTES / self._weight

    def _product(self, product: MeasuredProduct, num_tokens: float) -> float:
        seconds = product.seconds.at(num_tokens)
        if not self.settings.bandwidth:
            return seconds
        weights = product.outputs * product.inputs
        vectors = num_tokens * (product.outputs + product.inputs)
        size = weights * self._weight + vectors * _BYTES
        operations = 2 * weights * num_tokens / self._flops
        theirs = max(size / self.card.bandwidth, operations)
        return seconds * max(size / self.settings.bandwidth, operations) / theirs

    def _attention(self, work: WorkCounts) -> float:
        """Attention of a layer: of increments with their mean context, and of chunks with their mean length."""
        is_fused = self.settings.attention == "fused"
        seconds = 0.0
        if work.increments:
            context = work.context / work.increments
            seconds += _launched(self.increments, work.increments, context, is_fused)
        if work.chunk_tokens:
            number = max(1, work.members - work.increments)
            size = work.chunk_tokens / number
            before = work.chunk_context / number
            own = _launched(self.prompts, number, size, is_fused)
            seconds += own
            if before:
                whole = _launched(self.prompts, number, before + size, is_fused)
                seconds += max(0.0, whole - _launched(self.prompts, number, before, is_fused) - own)
        heads = max(1.0, self.model.num_kv_heads / self.settings.tensor)
        slot = 2 * heads * self.model.head_dim * _BYTES
        slower = 1 / self._bandwidth - 1 / self.card.bandwidth
        return seconds + work.num_read * slot * slower

    def _plain_bytes(self) -> float:
        """Bytes of a token in a layer on a device: norms and residuals, rotations, and activations of the MLP."""
        model = self.model
        heads = (2 * model.num_heads + 4 * model.num_kv_heads) * model.head_dim
        hidden = (2 + model.gated_mlp) * model.active_mlp_dim
        return _BYTES * (8 * model.embed_dim + (heads + hidden) / self.settings.tensor)

    def _experts(self, num_tokens: int) -> float:
        """Experts of a layer: those that independent choices of all tokens are expected to name."""
        model = self.model
        experts = model.experts
        if experts is None:
            return 0.0
        weights = (2 + model.gated_mlp) * model.embed_dim * model.mlp_dim / self.settings.tensor
        named = experts.count * (1 - (1 - experts.per_token / experts.count) ** num_tokens)
        size = named * weights * self._weight
        operations = 2 * num_tokens * experts.per_token * weights
        return max(size / self._bandwidth, operations / self._flops)


def _launched(plane: HeadsPlane, number: int, tokens: float, is_fused: bool) -> float:
    """Seconds of attention for a number of equal requests, in one launch or in one for each of them."""
    if is_fused:
        return plane.at(number, tokens)
    return number * plane.at(1, tokens)


def read_tables(text: str) -> TablesCost:
    """The cost of a flag, such as "tables:DIR,card=a100_sxm,source=vllm,model=preset:gpt3-13b".

    Raises:
        ConfigError: the flag, a table or the model is wrong; `param` is "cost".
    """
    folder, settings = parse_settings(text, TableSettings())
    try:
        model = read_model_config(settings.model)
    except ConfigError as error:
        raise ConfigError(f"model: {error.message}", param="cost") from error
    kernels = Kernels(Path(folder), settings.card, settings.source, settings.kind)
    return tables_cost(kernels, settings, model)


def tables_cost(kernels: Kernels, settings: TableSettings, model: ModelConfig) -> TablesCost:
    """The cost of a model from tables that were read.

    Raises:
        ConfigError: a table is wrong, or has no kernels for the model; `param` is "cost".
    """
    tensor = settings.tensor
    plain = model.mixers == ("attention",) and model.latent is None
    if not plain or model.head_dim != _HEAD_DIM or model.num_heads % tensor:
        raise ConfigError(
            f"the tables have attention with heads of {_HEAD_DIM} numbers in whole heads for each device; "
            f"{short(settings.model)} has others",
            param="cost",
        )
    kv_heads = max(1, model.num_kv_heads // tensor)
    heads = model.num_heads // tensor
    width = model.embed_dim
    shapes: list[tuple[float, float]] = [
        ((heads + 2 * kv_heads) * _HEAD_DIM, width),
        (width, heads * _HEAD_DIM),
    ]
    if model.experts is None:
        hidden = model.mlp_dim / tensor
        shapes += [((1 + model.gated_mlp) * hidden, width), (width, hidden)]
    shapes.append((model.vocab_size / tensor, width))
    products = [MeasuredProduct(kernels.product(*shape, settings.tile), *shape) for shape in shapes]
    return TablesCost(
        settings,
        model,
        ACCELERATORS[CARDS[settings.card]],
        products[:-1],
        products[-1],
        kernels.attention("context", heads, kv_heads),
        kernels.attention("generation", heads, kv_heads),
        None if tensor == 1 else kernels.all_reduce(tensor, settings.sums),
        kernels.least,
    )


def parse_settings(text: str, given: TableSettings) -> tuple[str, TableSettings]:
    """The folder and the settings of a flag, over given ones. Raises ConfigError; `param` is "cost"."""
    folder, *parts = text.removeprefix(TABLES).split(",")
    kinds = {name: type(value) for name, value in vars(given).items()}
    settings = replace(given, **read_values(parts, kinds, _USAGE))
    for name, known in (
        ("card", list(CARDS)),
        ("kind", list(_KINDS)),
        ("attention", ["fused", "request"]),
        ("sums", ["own", "nccl"]),
    ):
        if getattr(settings, name) not in known:
            message = (
                f"{name} must be one of {', '.join(known)}, got {short(getattr(settings, name))}"
            )
            raise ConfigError(message, param="cost")
    sizes = (settings.tensor, settings.tile, settings.link)
    if not (settings.source and settings.model and all(sizes)):
        raise ConfigError(f"cost must be {_USAGE}, with numbers above 0", param="cost")
    return folder, settings
