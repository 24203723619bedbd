"""Block sizes of the TPU kernels: what was measured, from a table, and a rule for everything else."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("blocks.json")
"""A list of objects with the fields of `Heads` and of `Blocks`; `tune.py` writes it."""

MOST_FETCH_PAGES = 128  # a line of the page lists
_FETCH_BYTES = 4 << 20  # of one of two buffers; a transfer of this size takes 5 us on v5e, many times its latency
_FETCH_TOKENS = 2048
_COMPUTE_TOKENS = 256
_WHOLE_TOKENS = 1024  # the more, the fewer maxima across lanes; scores of 512 x 1024 float32 are 2 MiB
_QUERY_ROWS = 512  # of one KV head: so many rows hide how long a matrix unit takes
_SUM_ELEMENTS = 1 << 20  # of all heads: 4 MiB for the values, as much again for what stands beside them


@dataclass(frozen=True)
class Heads:
    """What block sizes depend on. Heads are those of one device."""

    device: str  # as JAX names its kind, such as "TPU v5 lite"; "" where it is not known
    num_kv_heads: int
    groups: int
    head_dim: int
    page_size: int
    itemsize: int  # bytes of a stored value


@dataclass(frozen=True)
class Blocks:
    """Sizes that change nothing but speed and memory."""

    increment_rows: int  # rows of increments whose queries and outputs are in VMEM at a time
    query_block: int  # tokens of chunks that are multiplied at a time; a multiple of 16
    fetch_pages: int  # pages that are fetched at a time; a power of two up to 128
    compute_pages: int  # of these, pages that are multiplied at a time; divides the next
    whole_pages: int  # and pages where no query of a chunk needs a mask; divides `fetch_pages`


def choose_blocks(heads: Heads) -> Blocks:
    """The table's sizes, or the rule's."""
    return _table().get(heads) or rule(heads)


def rule(heads: Heads) -> Blocks:
    """Sizes for heads that were not measured: buffers as large as hide the latency of a transfer, and no larger."""
    slot = heads.num_kv_heads * 2 * heads.head_dim * heads.itemsize
    fetch = 1
    while 2 * fetch <= MOST_FETCH_PAGES and _fits(2 * fetch * heads.page_size, slot):
        fetch *= 2
    compute, whole = (min(fetch, max(1, n // heads.page_size)) for n in (_COMPUTE_TOKENS, _WHOLE_TOKENS))
    lanes = heads.num_kv_heads * heads.groups * 2 * heads.head_dim
    most = min(128, _QUERY_ROWS // heads.groups, _SUM_ELEMENTS // lanes)
    return Blocks(8, max(16, most // 16 * 16), fetch, compute, whole)


def read_table(text: str) -> dict[Heads, Blocks]:
    """Parse the data file."""
    return {
        Heads(**{name: entry[name] for name in Heads.__dataclass_fields__}): Blocks(
            **{name: entry[name] for name in Blocks.__dataclass_fields__}
        )
        for entry in json.loads(text)
    }


def write_table(table: Mapping[Heads, Blocks]) -> str:
    """The data file, an entry a line."""
    lines: Iterable[dict[str, Any]] = ({**asdict(heads), **asdict(blocks)} for heads, blocks in table.items())
    return "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"


@cache
def _table() -> dict[Heads, Blocks]:
    return read_table(TABLE.read_text(encoding="utf-8"))


def _fits(tokens: int, slot: int) -> bool:
    return tokens <= _FETCH_TOKENS and tokens * slot <= _FETCH_BYTES
