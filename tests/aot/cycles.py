"""How long the TPU kernels should take, from the compiler's schedule: `python -m tests.aot.cycles`.

Of each kernel's innermost loop, the one that multiplies, the bundles of the final schedule are counted: a bundle is a
cycle where nothing stalls. Against that stands the time that the transfer of the same pages takes, and for chunks the
time that the matrix units need at their best. What of the loop runs only for the last part of a context is left out.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.kernels.ragged_attention.tpu_blocks import Heads, rule


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip with one core, or of one core."""

    clock: float  # Hz
    bandwidth: float  # bytes/s of HBM
    flops: float  # of bfloat16


CHIPS = {"v5e": Chip(1.5e9, 819e9, 197e12), "v6e": Chip(1.75e9, 1640e9, 918e12)}
CASES = [
    Case("12 heads of 64", ((1, 1),), 12, 12, 64, 128),
    Case("25 heads of 64", ((1, 1),), 25, 25, 64, 128),
    Case("32 over 8 heads of 64", ((1, 1),), 32, 8, 64, 128),
    Case("32 over 8 heads of 128", ((1, 1),), 32, 8, 128, 128),
]
_LINE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(LB|PF)?\s*:\s*(>+)\s*\{(.*)")


def bundles(schedule: str) -> int:
    """Bundles of the loop that multiplies, in its straight part: what the compiler predicates has labels around it."""
    lines = [match for line in schedule.splitlines() if (match := _LINE.match(line))]
    return max((_length(body) for body in _loops(lines)), default=0)


def _loops(lines: list[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Innermost loops: from a loop's label to the first line that is less deep."""
    for begin, line in enumerate(lines):
        if line[1] == "LB":
            depth = len(line[2])
            end = next((i for i in range(begin + 1, len(lines)) if len(lines[i][2]) < depth), len(lines))
            if not any(inner[1] == "LB" for inner in lines[begin + 1 : end]):
                yield lines[begin:end]


def _length(body: list[re.Match[str]]) -> int:
    """Bundles between the labels around the first product; 0 where nothing is multiplied."""
    first = next((i for i, line in enumerate(body) if "vmat" in line[3]), None)
    if first is None:
        return 0
    begin = max(i for i in range(first + 1) if body[i][1] or i == 0)
    return next((i for i in range(first, len(body)) if body[i][1]), len(body)) - begin


def measure(generation: str, case: Case) -> Iterator[tuple[str, dict[str, float]]]:
    """Cycles of each kernel for one part of a context, and what bounds them."""
    from tests.aot.tpu import compile_attention

    chip = CHIPS[generation]
    groups = case.num_heads // case.num_kv_heads
    blocks = rule(Heads("", case.num_kv_heads, groups, case.head_dim, case.page_size, 2))
    tokens = blocks.compute_pages * case.page_size
    with TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        compile_attention(generation, case, "bfloat16", rows=64, tokens=256, pages_per_row=64)
        schedules = {path.name: path for path in Path(folder).glob("*-final_bundles.txt")}
        for kernel, queries in (("increments", 1), ("chunks", blocks.query_block)):
            name = next(name for name in schedules if kernel in name and "analysis" not in name)
            size = tokens * case.num_kv_heads * 2 * case.head_dim * 2
            flops = 4 * queries * tokens * case.num_heads * case.head_dim
            yield (
                kernel,
                {
                    "cycles": bundles(schedules[name].read_text(encoding="utf-8")),
                    "transfer": size / chip.bandwidth * chip.clock,
                    "products": flops / chip.flops * chip.clock,
                },
            )


def main(names: list[str]) -> None:
    """One row for each kernel: a process compiles one case, since libtpu reads its flags once."""
    generation, index = names
    for kernel, found in measure(generation, CASES[int(index)]):
        name = CASES[int(index)].name
        bound = max(found["transfer"], found["products"])
        share = bound / max(bound, found["cycles"])
        cells = [kernel, name, generation, *(f"{found[key]:.0f}" for key in found), f"{share:.0%}"]
        print(f"| {' | '.join(cells)} |")
        print(json.dumps({"kernel": kernel, "heads": name, "generation": generation, **found, "share": share}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
