"""Bounds of the speed of the Hopper kernels on an H200, from what each thread block moves and computes.

    python -m tests.aot.roofline [--write]

prints the table of docs/measured/roofline.md, or writes it. The work is cut by the kernels' own code (`gpu_plan.py`),
so uneven shares and the padding of products count. A thread block has a multiprocessor of its own. Its time is the
longest time of its parts: first as if they overlapped without gaps, then, for chunks, as if products and softmax took
turns. The time to start kernels and to wait at barriers is not included, so these are bounds and not measurements.

By Little's law, memory stays busy if bandwidth x latency bytes are in flight.
"""

import argparse
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lab.pages.markdown import Page
from orca_jax.kernels.kv_pages import HeadMajorPages, RowArrays, pages_shape
from orca_jax.kernels.linear_state.triton import BLOCK, CHUNK, COLUMNS
from orca_jax.kernels.ragged_attention import Scores
from orca_jax.kernels.ragged_attention.gpu_plan import (
    CHUNK_BLOCKS,
    INCREMENT_BLOCKS,
    ROWS,
    TILE,
    cut_contexts,
    cut_queries,
    most_pieces,
)
from orca_jax.kernels.ragged_attention.hopper.increments import CONSUMERS
from orca_jax.kernels.ragged_attention.triton_latents import for_chunks, shape_of
from tests.aot.table import MEASURED, replace_table

HEADER = [
    "kernel",
    "work",
    "shared memory, KiB",
    "in flight, KiB",
    "busiest block",
    "bound by",
    "at best, us",
    "share",
]


@dataclass(frozen=True)
class Card:
    """Published figures, except for the latency: that is a figure of other authors for HBM under load."""

    multiprocessors: int = 132
    clock: float = 1.83e9  # Hz, at which 989 TFLOP/s are published
    bandwidth: float = 4.8e12  # bytes/s
    latency: float = 0.8e-6  # s
    flops: float = 4096  # dense bf16, of one multiprocessor in one cycle
    exponentials: float = 16  # likewise
    other_ops: float = 128  # float32, likewise
    l2_bytes: float = 64  # from L2 to one multiprocessor in one cycle
    shared_bytes: int = 227 << 10  # of one thread block at most

    def seconds(self, amount: float, per_cycle: float) -> float:
        """The time of one multiprocessor for an amount of work."""
        return amount / per_cycle / self.clock


@dataclass(frozen=True)
class Heads:
    """The heads of one layer on one device."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def padded_groups(self) -> int:
        """G, padded as in the results of increments."""
        return -(-self.num_heads // self.num_kv_heads // 4) * 4


H200, LLAMA, GPT2_XL = Card(), Heads(32, 8, 128), Heads(25, 25, 64)
# float32 operations on a score beside its exponential: scale, maximum, subtract, sum, mask, convert
SOFTMAX_OPS = 6
INCREMENTS = [(rows, context) for rows in (1, 8, 64, 256) for context in (512, 4096, 32768)]
CHUNKS = (1024, 4096, 16384)
LATENT = 576  # numbers of a token in DeepSeek's layers
LATENTS = [(16, 1, 32768), (16, 8, 4096), (16, 64, 1024), (16, 64, 8192), (16, 256, 1024)]
LATENTS += [(128, 64, 1024), (16, 64, 1024, 5), (16, 64, 8192, 5)]
"""Query heads, rows, context, and queries of each row."""


def shares(per_item: np.ndarray, card: Card) -> np.ndarray:
    """The work of each thread block, if items are assigned to them in turn."""
    rounds = -(-len(per_item) // card.multiprocessors)
    padded = np.zeros(rounds * card.multiprocessors)
    padded[: len(per_item)] = per_item
    return padded.reshape(rounds, -1).sum(axis=0)


def row(
    kernel: str,
    work: str,
    memory: tuple[float, float],
    busiest: float,
    times: dict[str, float],
    share: str,
) -> list[str]:
    """Format a row of the table."""
    bound = max(times, key=lambda name: times[name])
    kib = [f"{size / 1024:.0f}" for size in memory]
    return [kernel, work, *kib, f"{busiest:.2f}", bound, f"{times[bound] * 1e6:.1f}", share]


def increments(card: Card, heads: Heads, rows: int, context: int) -> list[str]:
    """A row for increments. Its share compares the bytes of keys and values with what memory could read in the time."""
    block, stages = INCREMENT_BLOCKS[heads.head_dim]
    ones = jnp.ones(rows, jnp.int32)
    most = most_pieces(rows, heads.num_kv_heads, card.multiprocessors)
    pieces = cut_contexts(ones, ones * context, num_pieces=most, block=block, sliding_window=None)
    total = int(pieces.total[0])
    first, end = np.asarray(pieces.fields)[1:3, :total]
    blocks = shares(np.repeat(-(-(end - first) // block), heads.num_kv_heads), card)
    block_bytes = block * heads.head_dim * 2 * 2
    # Written, then read.
    partial = (
        2 * CONSUMERS * total * heads.num_kv_heads * heads.padded_groups * (heads.head_dim + 1) * 4
    )
    # Each consumer has half of the blocks, and overlaps nothing.
    products = card.seconds(blocks.max() * ROWS * block * heads.head_dim * 4, card.flops)
    exponentials = card.seconds(blocks.max() * ROWS * block, card.exponentials)
    others = card.seconds(
        blocks.max() * ROWS * (block * SOFTMAX_OPS + heads.head_dim), card.other_ops
    )
    times = {
        "memory": (blocks.sum() * block_bytes + partial) / card.bandwidth,
        "L2 to one multiprocessor": card.seconds(blocks.max() * block_bytes, card.l2_bytes),
        "latency": card.latency * (1 + blocks.max() / stages),
        "tensor cores": products,
        "exponentials": exponentials,
        "a consumer": (products + exponentials + others) / CONSUMERS,
    }
    useful = rows * context * heads.num_kv_heads * heads.head_dim * 4
    share = f"{useful / card.bandwidth / max(times.values()):.0%} of bandwidth"
    shared = stages * block_bytes + CONSUMERS * ROWS * (heads.head_dim * (2 + 4) + 4)
    busiest = blocks.max() / blocks.mean()
    name = f"increments, {heads.num_heads} over {heads.num_kv_heads} of {heads.head_dim}"
    return row(name, f"{rows} x {context}", (shared, stages * block_bytes), busiest, times, share)


def chunks(card: Card, heads: Heads, tokens: int) -> list[str]:
    """A row for one prompt from its first token. Its share counts the products below the diagonal."""
    block, stages = CHUNK_BLOCKS
    start, length = jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32)
    tiles = cut_queries(
        RowArrays(start[None], start, length, length),
        size=TILE,
        num_tokens=tokens,
        block=block,
        sliding_window=None,
    )
    total = int(tiles.total[0])
    _, _, number, position, first, _ = np.asarray(tiles.fields)[:, :total][:, ::-1]
    blocks = shares(
        np.repeat(-(-(position + number - first) // block), heads.num_heads), card
    ).max()
    mean = np.sum(-(-(position + number - first) // block)) * heads.num_heads / card.multiprocessors
    products = card.seconds(blocks * TILE * block * heads.head_dim * 4, card.flops)
    exponentials = card.seconds(blocks * TILE * block, card.exponentials)
    others = card.seconds(blocks * TILE * block * SOFTMAX_OPS, card.other_ops)
    times = {
        "tensor cores": products,
        "softmax": exponentials + others,
        "L2 to one multiprocessor": card.seconds(
            blocks * block * heads.head_dim * 4, card.l2_bytes
        ),
    }
    useful = 4 * heads.head_dim * heads.num_heads * tokens * (tokens + 1) / 2
    peak = card.flops * card.clock * card.multiprocessors
    best, worst = (
        useful / peak / time for time in (max(times.values()), products + exponentials + others)
    )
    block_bytes = block * heads.head_dim * 2 * 2
    shared = stages * block_bytes + 3 * TILE * heads.head_dim * 2
    name = f"chunks, {heads.num_heads} over {heads.num_kv_heads} of {heads.head_dim}"
    share = f"{best:.0%} of products, {worst:.0%} if nothing overlaps"
    return row(name, str(tokens), (shared, stages * block_bytes), blocks / mean, times, share)


@dataclass(frozen=True)
class States:
    """The states of one layer on one device."""

    heads: int
    keys: int
    values: int
    layers: int

    @property
    def name(self) -> str:
        """The sizes, as a kernel of the table names them."""
        return f"{self.heads} of {self.keys} x {self.values}"


QWEN = States(32, 128, 128, 24)
STATE_ROWS = (8, 64, 256)
STATE_TOKENS = (512, 2048)
SHARED = 229636  # bytes, as compiled
PRODUCTS = 3  # of bfloat16 for one of float32
MMA = 0.5  # of the rate of products, without whole warpgroups
SPLIT_OPS = 6  # float32 operations for both halves of a factor
SOLVE_OPS = 5  # on a number of a triangle for each of its rows


def state_increments(card: Card, states: States, rows: int) -> list[str]:
    """A row for single tokens of the delta rule, whose states are read and written once."""
    size = 4 * rows * states.heads * states.keys * states.values
    vectors = rows * states.heads * (2 * states.keys + 2 * states.values + 2) * 4
    moved = 2 * size + vectors
    operations = card.seconds(6 * size / 4 / card.multiprocessors, card.other_ops)
    times = {"memory": moved / card.bandwidth, "operations": operations}
    share = f"{2 * size / moved:.0%} are states, read and written once"
    name = f"states, one token, {states.name}"
    return row(name, f"{rows} x 1", (0, 0), 1.0, times, share)


def state_chunks(card: Card, states: States, tokens: int) -> list[str]:
    """A row for one prompt of the delta rule: the factors of all chunks, then the chunks one after the other."""
    chunks = tokens // CHUNK
    inputs = CHUNK * states.keys * 4  # bytes of queries or keys of a chunk and a head
    square = CHUNK * CHUNK * 4
    factors = -(-chunks * states.heads // card.multiprocessors)
    blocks = factors * 6 * 2 * BLOCK**2 * states.keys * PRODUCTS
    solved = factors * 2 * BLOCK**3 * SOLVE_OPS
    split = factors * 2 * CHUNK**2 * SPLIT_OPS
    first = {
        "tensor cores": card.seconds(blocks, MMA * card.flops),
        "solution": card.seconds(solved + split, card.other_ops),
        "L2 to one multiprocessor": card.seconds(
            factors * (2 * inputs + 2 * square), card.l2_bytes
        ),
    }
    programs = states.heads * states.values // COLUMNS
    rounds = -(-programs // card.multiprocessors) * chunks
    products = rounds * 2 * CHUNK * COLUMNS * (3 * states.keys + 2 * CHUNK) * PRODUCTS
    halves = rounds * COLUMNS * (states.keys + 3 * CHUNK) * SPLIT_OPS
    fetched = 2 * inputs + 2 * square + CHUNK * COLUMNS * 4
    second = {
        "tensor cores": card.seconds(products, card.flops),
        "halves": card.seconds(halves, card.other_ops),
        "L2 to one multiprocessor": card.seconds(rounds * fetched, card.l2_bytes),
        "latency": card.latency * rounds / 2,
    }
    least = max(first.values()) + max(second.values())
    worst = sum(first.values()) + sum(second.values())
    best, most = (1e3 * states.layers * each for each in (least, worst))
    share = f"{best:.1f} ms of {states.layers} layers, {most:.1f} if nothing overlaps"
    busiest = rounds * card.multiprocessors / (programs * chunks)
    name = f"states, chunks, {states.name}"
    bound = max(second, key=lambda part: second[part])
    return row(name, str(tokens), (SHARED, 2 * fetched), busiest, {bound: least}, share)


def latents(card: Card, num_heads: int, rows: int, context: int, queries: int = 1) -> list[str]:
    """A row for latents of DeepSeek by Triton's kernels. Its share compares the bytes of the latents, read once.

    A program overlaps transfers alone, and its products have half of the rate that needs 64 rows.
    """
    q = jax.ShapeDtypeStruct((1, num_heads, LATENT), jnp.bfloat16)
    pages = pages_shape("token_major", 1, 1, LATENT, 128, jnp.dtype("bfloat16"), has_values=False)
    assert isinstance(pages, HeadMajorPages)
    shape = shape_of(q, pages, Scores(1.0))
    ones = jnp.ones(rows, jnp.int32)
    sizes = {"block": shape.block, "sliding_window": None}
    partial = 0
    if queries == 1:
        most = rows + card.multiprocessors
        pieces = cut_contexts(ones, ones * context, num_pieces=most, **sizes)
        first, end = np.asarray(pieces.fields)[1:3, : int(pieces.total[0])]
        # Written, then read.
        partial = 2 * len(first) * num_heads * (LATENT + 1) * 4
    else:
        shape = for_chunks(shape, rows * queries)
        start = queries * jnp.arange(rows, dtype=jnp.int32)
        requests = RowArrays(start[:, None], start, queries * ones, context * ones)
        size = shape.rows // shape.groups
        tiles = cut_queries(requests, size=size, num_tokens=rows * queries, **sizes)
        _, _, number, position, first, _ = np.asarray(tiles.fields)[:, : int(tiles.total[0])]
        end = position + number
    blocks = shares(np.repeat(-(-(end - first) // shape.block), shape.num_kv_heads), card)
    block_bytes = shape.block * LATENT * 2
    scores = blocks.max() * shape.rows * shape.block
    work = card.seconds(scores * LATENT * 4, card.flops / 2)
    work += card.seconds(scores, card.exponentials)
    work += card.seconds(scores * (SOFTMAX_OPS + LATENT / shape.block), card.other_ops)
    useful = rows * context * LATENT * 2
    times = {
        "memory": (useful + partial) / card.bandwidth,
        "L2 to one multiprocessor": card.seconds(blocks.max() * block_bytes, card.l2_bytes),
        "latency": card.latency * (1 + blocks.max() / shape.stages),
        "a program": work,
    }
    share = f"{useful / card.bandwidth / max(times.values()):.0%} of bandwidth"
    name = f"latents, {num_heads} heads"
    if queries > 1:
        name += f", {queries} queries"
    flight = shape.stages * block_bytes
    busiest = blocks.max() / blocks.mean()
    return row(name, f"{rows} x {context}", (flight, flight), busiest, times, share)


def table() -> list[list[str]]:
    """All rows of the table."""
    found = [increments(H200, LLAMA, *work) for work in INCREMENTS]
    found += [increments(H200, GPT2_XL, *work) for work in INCREMENTS if work[1] == 512]
    found += [latents(H200, *work) for work in LATENTS]
    found += [chunks(H200, heads, tokens) for heads in (LLAMA, GPT2_XL) for tokens in CHUNKS]
    found += [state_increments(H200, QWEN, rows) for rows in STATE_ROWS]
    return found + [state_chunks(H200, QWEN, tokens) for tokens in STATE_TOKENS]


def page(text: str) -> str:
    """The text of the page with a new table."""
    return replace_table(text, HEADER, table())


PAGE = Page(MEASURED / "roofline.md", page, "python -m tests.aot.roofline --write")


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/measured/roofline.md"
    )
    if parser.parse_args().write:
        PAGE.write()
        return
    print("\n".join(" | ".join(cells) for cells in [HEADER, *table()]))


if __name__ == "__main__":
    main()
