"""Measured kernels of a card by engine: products, attention and sums over devices.

A folder has, for a CARD and a SOURCE of kernels, each plain or compressed by gzip and in microseconds:

    CARD_gemm_SOURCE.csv                  n,k,m,us                        product [m, k] x [k, n], also _fp8, _fp8_block
    CARD_context_attention_SOURCE.csv     heads,kv_heads,batch,tokens,us  of whole prompts, in a layer
    CARD_generation_attention_SOURCE.csv  heads,kv_heads,batch,tokens,us  of increments with `tokens` of context each
    CARD_collectives.csv                  source,op,gpus,bytes,us
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from orca_jax.tools.plan.measured import (
    Curve,
    Grid,
    neighbours,
    power_between,
    read_rows,
    stepped,
    table_file,
)
from orca_jax.values.errors import ConfigError

COLUMNS = {
    "gemm": ("n", "k", "m"),
    "context_attention": ("heads", "kv_heads", "batch", "tokens"),
    "generation_attention": ("heads", "kv_heads", "batch", "tokens"),
    "collectives": ("gpus", "bytes"),
}
TEXTS = {"collectives": ("source", "op")}
RULES = {
    "gemm": "linear in n, k and m",
    "context_attention": "linear in heads and batch, by powers between numbers of tokens",
    "generation_attention": "linear in heads, batch and tokens",
    "collectives": "linear in bytes",
}
"""The seconds between points. Beyond the last one they grow in proportion, with tokens of prompts by their square."""


SUM = "all_reduce"
EAGER = "_eager"  # launched one by one


class Plane:
    """Seconds of attention by a batch and the tokens of each of its members.

    Args:
        lines: seconds by batch, for each number of tokens.
        is_of_prompts: tokens count by powers, and beyond the last one by their square.
    """

    def __init__(self, lines: Mapping[int, Mapping[int, float]], *, is_of_prompts: bool) -> None:
        self._tokens = sorted(lines)
        self._lines = [Curve(lines[number]) for number in self._tokens]
        self._is_of_prompts = is_of_prompts
        self._num_beyond = 0

    @property
    def num_outside(self) -> int:
        """The number of looked up values outside of the points."""
        return self._num_beyond + sum([line.num_outside for line in self._lines])

    def at(self, batch: float, tokens: float) -> float:
        """The seconds; those of the fewest tokens below them."""
        numbers = self._tokens
        self._num_beyond += not numbers[0] <= tokens <= numbers[-1]
        (low, share), (high, other) = neighbours(numbers, tokens)
        least = self._lines[low].at(batch)
        if not other:
            power = 2 if self._is_of_prompts else 1
            return least * max(1.0, tokens / numbers[-1]) ** power
        most = self._lines[high].at(batch)
        if self._is_of_prompts:
            return power_between(tokens, (numbers[low], least), (numbers[high], most))
        return share * least + other * most


class HeadsPlane:
    """Seconds of attention for some heads, from planes of other ones.

    With key/value heads that a table has, they are linear in the heads. Else a batch counts in proportion to its
    key/value heads, with as many heads for each of them.

    Args:
        planes: the nearest planes, each with its share.
        batch: factor on the batch.
    """

    def __init__(self, planes: Mapping[Plane, float], batch: float = 1.0) -> None:
        self._planes = planes
        self._batch = batch

    @property
    def num_outside(self) -> int:
        """The number of looked up values outside of the points."""
        return sum([plane.num_outside for plane in self._planes])

    def at(self, batch: float, tokens: float) -> float:
        """The seconds of a batch whose members have as many tokens each."""
        seconds = 0.0
        for plane, share in self._planes.items():
            seconds += share * plane.at(self._batch * batch, tokens)
        return seconds


class Kernels:
    """The tables of a card and a source.

    Args:
        folder: the place of the tables.
        card: the first part of their names, such as "a100_sxm".
        source: the engine with the kernels, such as "vllm".
        kind: the type of products: "" for bfloat16, or "fp8", "fp8_block".

    Attributes:
        least: seconds of the shortest product: its start, more than its work.

    Raises:
        ConfigError: a table is missing, cannot be read, or a line of it is wrong; `param` is "cost".
    """

    def __init__(self, folder: Path, card: str, source: str, kind: str = "") -> None:
        self._folder = folder
        self._card = card
        self._source = source
        end = f"_{source}_{kind}" if kind else f"_{source}"
        by_tokens: dict[int, dict[tuple[int, ...], float]] = {}
        for row in read_rows(table_file(folder / f"{card}_gemm{end}"), COLUMNS["gemm"]):
            *sizes, tokens = row.key
            by_tokens.setdefault(tokens, {})[tuple(sizes)] = row.seconds
        self.least = min([min(points.values()) for points in by_tokens.values()])
        self._products = {tokens: Grid(points) for tokens, points in by_tokens.items()}
        self._sums: dict[str, dict[int, dict[int, float]]] = {}
        path = table_file(folder / f"{card}_collectives")
        for row in read_rows(path, COLUMNS["collectives"], TEXTS["collectives"]):
            devices, size = row.key
            self._sums.setdefault(row.name, {}).setdefault(devices, {})[size] = row.seconds

    def product(self, outputs: float, inputs: float, tile: int = 1) -> Curve:
        """Seconds by tokens of a product with a matrix of a device, [inputs, outputs], in whole tiles of tokens."""
        sizes = (outputs, inputs)
        is_outside = not all([grid.holds(sizes) for grid in self._products.values()])
        points = {tokens: grid.grown(sizes) for tokens, grid in self._products.items()}
        return Curve(points if tile == 1 else stepped(points, tile), is_outside=is_outside)

    def all_reduce(self, devices: int, sums: str = "own") -> Curve:
        """Seconds by bytes of a sum over devices.

        Args:
            devices: their number, on one host.
            sums: "own" for those of the source, in a graph if it has such; "nccl" for NCCL's, also without own ones.

        Raises:
            ConfigError: the table has no sum over so many devices.
        """
        names = [name for name in self._sums if f" {SUM}" in name and not name.endswith(EAGER)]
        chosen = [name for name in names if sums == "own" and name.startswith(self._source)]
        for name in chosen or [name for name in names if name.startswith("nccl")]:
            if devices in self._sums[name]:
                return Curve(self._sums[name][devices])
        message = f"{self._card}_collectives has no {SUM} over {devices} devices"
        raise ConfigError(message, param="cost")

    def attention(self, phase: str, heads: int, kv_heads: int) -> HeadsPlane:
        """Seconds by batch and tokens of attention in a layer on a device.

        Args:
            phase: "context" for whole prompts, "generation" for increments.
            heads: those of the device.
            kv_heads: those of the device.

        Raises:
            ConfigError: the table is wrong, or has no heads like these.
        """
        path = table_file(self._folder / f"{self._card}_{phase}_attention_{self._source}")
        points = read_attention(path)
        shares, factor = nearest_heads(list(points), heads, kv_heads)
        if not shares:
            raise ConfigError(f"{path} has no heads like {heads} with {kv_heads}", param="cost")
        planes = {
            Plane(points[key], is_of_prompts=phase == "context"): share
            for key, share in shares.items()
        }
        return HeadsPlane(planes, factor)


def read_attention(path: Path) -> dict[tuple[int, int], dict[int, dict[int, float]]]:
    """Seconds by heads and key/value heads, by tokens, by batch. Raises ConfigError: a line is wrong."""
    points: dict[tuple[int, int], dict[int, dict[int, float]]] = {}
    for row in read_rows(path, COLUMNS["generation_attention"]):
        heads, kv_heads, batch, tokens = row.key
        lines = points.setdefault((heads, kv_heads), {})
        lines.setdefault(tokens, {})[batch] = row.seconds
    return points


def nearest_heads(
    known: Sequence[tuple[int, int]], heads: int, kv_heads: int
) -> tuple[dict[tuple[int, int], float], float]:
    """The shares of known pairs of heads and key/value heads, and a factor on the batch; no shares: none is like it.

    Between two pairs with these key/value heads it is linear in the heads. Else pairs with as many heads for each
    key/value head stand for it: linear between two, or the largest with a larger batch.
    """
    same = sorted([pair for pair in known if pair[1] == kv_heads])
    if same and same[0][0] <= heads <= same[-1][0]:
        return _shared(same, [pair[0] for pair in same], heads), 1.0
    alike = sorted([pair for pair in known if pair[0] * kv_heads == pair[1] * heads])
    if not alike or kv_heads < alike[0][1]:
        return {}, 1.0
    return _shared(alike, [pair[1] for pair in alike], kv_heads), max(1.0, kv_heads / alike[-1][1])


def _shared(
    pairs: Sequence[tuple[int, int]], numbers: Sequence[int], number: int
) -> dict[tuple[int, int], float]:
    return {pairs[place]: share for place, share in neighbours(numbers, number) if share}
