"""Count the requests of each length that one start holds, by `orca-jax plan` and by the engine's pools.

The bytes of a request are those of the tokens that its layers read: the newest ones in layers with windows. Every count
is of requests that end within their last page, so that the pages of a window are cut at both ends.
"""

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from orca_jax.assembly.choices import PAGE_SIZE
from orca_jax.helpers.reporting import print_table
from orca_jax.sched.kv import KVManager
from orca_jax.tools.plan.accelerators import GIB
from orca_jax.tools.plan.memory import Capacity, Split
from orca_jax.values.cache_spec import LayerCache, LayerGroup, PageShape, form_groups
from orca_jax.values.config import CacheConfig

CONTEXTS = (1024, 8192, 32768)
MEMORY = 64 * GIB  # of bfloat16 pages
WINDOW, CHUNK = 1024, 512
_UNUSED = 8  # tokens at the end of the last page


class Pattern(NamedTuple):
    """Layers with windows, and every sixth one with all tokens."""

    num_layers: int
    full: PageShape
    window: PageShape
    share: float  # of the requests that their bytes allow

    @property
    def layers(self) -> list[LayerCache]:
        """What each layer keeps."""
        kinds = LayerCache(self.window, WINDOW), LayerCache(self.full)
        return [kinds[layer % 6 == 5] for layer in range(self.num_layers)]


PATTERNS = {
    "Gemma 3 27B": Pattern(62, PageShape(16, 128), PageShape(16, 128), 0.85),
    "pages as in Gemma 4": Pattern(60, PageShape(4, 512), PageShape(16, 256), 0.7),
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add no flag."""


def run(args: argparse.Namespace) -> int:
    """Print a table for each model and a line of JSON. Return 1 if too few requests fit."""
    found = {}
    holds_too_few = False
    for name, pattern in PATTERNS.items():
        found[name] = [held(pattern, context) for context in CONTEXTS]
        for row in found[name]:
            print_table(f"{name}, {row['tokens']} tokens in {MEMORY // GIB} GiB", row)
            holds_too_few |= row["share"] < pattern.share
    print(json.dumps(found))
    return int(holds_too_few)


def held(pattern: Pattern, context: int) -> dict[str, float]:
    """The requests that fit, by their bytes, by `plan` and by the pools, and the least share of the first."""
    groups = form_groups(pattern.layers, max(CONTEXTS))
    tokens = context - _UNUSED
    (block,) = {2 * PAGE_SIZE * group.pages_per_block * group.shape.token_size for group in groups}
    number = MEMORY // block
    needed = sum(
        2 * layer.shape.token_size * min(tokens, layer.window or tokens) for layer in pattern.layers
    )
    cache = CacheConfig(groups, (number,), PAGE_SIZE, "bfloat16")
    planned = Capacity(Split(1, 1), (), 1, max(CONTEXTS), tokens, cache).cache_tokens // tokens
    allowed = MEMORY // needed
    counted = filled(groups, number, tokens)
    share = min(planned, counted) / allowed
    return {
        "tokens": tokens,
        "allowed": allowed,
        "planned": planned,
        "in pools": counted,
        "share": round(share, 3),
    }


def filled(groups: Sequence[LayerGroup], num_blocks: int, tokens: int) -> int:
    """Requests that the pools hold together: prompts in chunks, and a token more, until one lacks blocks."""
    kv = KVManager((num_blocks,), PAGE_SIZE, num_blocks, groups=groups, longest=CHUNK)
    while True:
        row = kv.acquire_row()
        start = 0
        while start < tokens:
            size = min(CHUNK, tokens - 1 - start) or 1
            kv.leave(row, start)
            if kv.lacking(row, start + size) > kv.num_free_blocks:
                return kv.num_held_rows - 1
            kv.allocate(row, start + size)
            start += size
