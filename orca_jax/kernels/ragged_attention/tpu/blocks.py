"""Block sizes of the TPU kernels: a table of measured sizes, and a rule for all other shapes of heads."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("blocks.json")
"""A JSON list of objects with the fields of `Heads` and `BlockSizes`; `tune.py` writes it."""

MOST_FETCH_PAGES = 128  # the length of a page list
# of one of two buffers; this transfer takes 5 us on v5e, many times its latency
_FETCH_BYTES = 4 << 20
_FETCH_TOKENS = 2048
_COMPUTE_TOKENS = 256
# Of increments, whose rows may be short: several fetches in flight hide the latency of a transfer.
_INCREMENT_BYTES = 2 << 20
_INCREMENT_TOKENS = 1024
_RING_BYTES = 8 << 20
_MOST_BUFFERS = 8
_PART_TOKENS = (
    1024  # times heads: the work on fewer would be shorter than the latency of its operations
)
# more tokens need fewer maxima across lanes; scores of 512 x 1024 float32 take 2 MiB
_WHOLE_TOKENS = 1024
_QUERY_ROWS = 512  # of one KV head; enough to hide the latency of a matrix unit
# Latents: the queries of a token are many rows of one head. With more rows, short chunks pay for those of others.
_LATENT_ROWS = 128
_LEAST_LATENT_QUERIES = 4
_LATENT_TOKENS = 512
# of all heads: 4 MiB of weighted values; the arrays beside them take as much again
_SUM_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Heads:
    """The key of the table: the heads on one device and their pages."""

    device: str  # JAX's device kind, such as "TPU v5 lite"; "" if it is not known
    num_kv_heads: int
    groups: int
    head_dim: int
    page_size: int
    itemsize: int  # bytes of a stored value
    has_values: bool = True  # False: latents


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the kernels' blocks. They change speed and memory use, never results."""

    increment_rows: int  # rows of increments in a query block
    query_block: int  # tokens of chunks in a query block; a multiple of 16
    fetch_pages: int  # pages in a fetch; a power of two up to 128
    compute_pages: int  # pages in a part; divides `whole_pages`
    whole_pages: int  # pages in a part of a chunk without masks; divides `fetch_pages`
    increment_pages: int  # pages in a fetch of increments; a power of two up to 128
    part_pages: int  # pages in a part of increments; divides `increment_pages`
    buffers: int  # fetches of increments in VMEM


def choose_blocks(heads: Heads) -> BlockSizes:
    """The sizes in the table; those of the rule if the table has no entry for these heads."""
    return _table().get(heads) or rule(heads)


def rule(heads: Heads) -> BlockSizes:
    """Sizes for heads without a measurement: buffers just large enough to hide the latency of a transfer."""
    width = heads.num_kv_heads * (1 + heads.has_values) * heads.head_dim
    page = heads.page_size * width * heads.itemsize
    fetch = _pages_that_fit(heads.page_size, _FETCH_TOKENS, page, _FETCH_BYTES)
    increment = _pages_that_fit(heads.page_size, _INCREMENT_TOKENS, page, _INCREMENT_BYTES)
    buffers = max(2, min(_MOST_BUFFERS, _RING_BYTES // (increment * page)))
    compute = _COMPUTE_TOKENS
    part = max(compute, 1 << (_PART_TOKENS // heads.num_kv_heads).bit_length() - 1)
    most = min(128, _QUERY_ROWS // heads.groups, _SUM_ELEMENTS // (width * heads.groups))
    least = 16
    if not heads.has_values:
        compute = part = _LATENT_TOKENS
        most = max(_LEAST_LATENT_QUERIES, _LATENT_ROWS // heads.groups)
        least = 16 // math.gcd(16, heads.groups)
    compute, whole = (min(fetch, max(1, n // heads.page_size)) for n in (compute, _WHOLE_TOKENS))
    return BlockSizes(
        increment_rows=8,
        query_block=max(least, most // least * least),
        fetch_pages=fetch,
        compute_pages=compute,
        whole_pages=whole,
        increment_pages=increment,
        part_pages=min(increment, max(1, part // heads.page_size)),
        buffers=buffers,
    )


def read_table(text: str) -> dict[Heads, BlockSizes]:
    """Parse the data file."""
    table: dict[Heads, BlockSizes] = {}
    for entry in json.loads(text):
        heads = Heads(**{name: entry[name] for name in Heads.__dataclass_fields__})
        sizes = {name: entry[name] for name in BlockSizes.__dataclass_fields__}
        table[heads] = BlockSizes(**sizes)
    return table


def write_table(table: Mapping[Heads, BlockSizes]) -> str:
    """Render the data file, with one entry per line."""
    lines: Iterable[dict[str, Any]] = (
        {**asdict(heads), **asdict(blocks)} for heads, blocks in table.items()
    )
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


@cache
def _table() -> dict[Heads, BlockSizes]:
    return read_table(TABLE.read_text(encoding="utf-8"))


def _pages_that_fit(page_size: int, most_tokens: int, page_bytes: int, most_bytes: int) -> int:
    """The largest power of two of pages within these limits; at least one."""
    most = min(MOST_FETCH_PAGES, most_tokens // page_size, most_bytes // page_bytes)
    return 1 << max(1, most).bit_length() - 1
