"""Count the cycles of the TPU kernels in the compiler's schedule: `python -m tests.aot.cycles`, about ten minutes.

The program counts the bundles of each kernel's innermost loop, which multiplies, in the final schedule: one bundle is
one cycle without stalls. It compares them with the time to transfer the same pages and, for chunks, with the time of
the matrix units at their published rate. Predicated code for the last part of a context is left out.

Rows named `64 x 1,024` are whole calls of increments: their loops over rows, fetches, pages and parts, with predicated
code, beside the latency of the transfers. A transfer is taken to last `LATENCY` when it moves nothing, and all buffers
but one are in flight.

The run updates docs/measured/cycles.md; `... v5e` updates the rows of one generation, and `... v5e 3` prints one case.
Each case is a process of its own, since libtpu reads its flags once.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.kernels.ragged_attention.cases import Case
from orca_jax.kernels.ragged_attention.tpu.blocks import Heads, rule
from tests.aot.table import MEASURED, write_table


@dataclass(frozen=True)
class Chip:
    """Published figures of a chip, or of one core if it has two. The clock rate follows from the rate of products."""

    clock: float  # Hz
    bandwidth: float  # bytes/s of HBM
    flops: float  # of bfloat16


CHIPS = {
    "v5e": Chip(1.5e9, 819e9, 197e12),
    # a kernel runs on one core; this core has all of the chip's bandwidth
    "v5p": Chip(1.75e9, 2765e9, 459e12 / 2),
    "v6e": Chip(1.75e9, 1640e9, 918e12),
    "tpu7x": Chip(2.2e9, 7380e9 / 2, 2307e12 / 2),  # a core is a device
}
LATENCY = 1e-6  # seconds, of a transfer from HBM; assumed
ROWS, CONTEXT = 64, 1024
HEADER = [
    "kernel",
    "heads",
    "for",
    "KiB",
    "MFLOP",
    "cycles of the loop",
    "of the transfer",
    "of the products",
    "of the latency",
    "bound",
]
NAMED = ((1, 1),)  # the requests of a case do not matter to the compiler
CASES = [
    Case("12 heads of 64", NAMED, 12, 12, 64, 128, page_dtype="bfloat16"),
    Case("25 heads of 64", NAMED, 25, 25, 64, 128, page_dtype="bfloat16"),
    Case("32 over 8 heads of 64", NAMED, 32, 8, 64, 128, page_dtype="bfloat16"),
    Case("32 over 8 heads of 128", NAMED, 32, 8, 128, 128, page_dtype="bfloat16"),
    Case("4 over 1 heads of 128", NAMED, 4, 1, 128, 128, page_dtype="bfloat16"),
    Case("12 heads of 64, int8 pages", NAMED, 12, 12, 64, 128, page_dtype="int8"),
    Case("32 over 8 heads of 128, int8 pages", NAMED, 32, 8, 128, 128, page_dtype="int8"),
    Case("latents of 16 heads", NAMED, 16, 1, 576, 128, page_dtype="bfloat16", has_values=False),
    Case("latents of 128 heads", NAMED, 128, 1, 576, 128, page_dtype="bfloat16", has_values=False),
]
_LINE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(LB|PF)?\s*:\s*(>+)\s*\{(.*)")


def bundles(schedule: str, instruction: str) -> int:
    """Count the bundles of the loop with an instruction, without predicated code: that has labels around it."""
    lines = [match for line in schedule.splitlines() if (match := _LINE.match(line))]
    return max((_length(body, instruction) for body in _loops(lines)), default=0)


def call_bundles(schedule: str, fetches: int, pages: int, parts: int) -> int:
    """Count the bundles of a row of increments, with those of its loops for each of their passes."""
    lines = [match for line in schedule.splitlines() if (match := _LINE.match(line))]
    multiplied = next(i for i, line in enumerate(lines) if "vmat" in line[3])
    begin = max(i for i in range(multiplied) if lines[i][1] == "LB" and len(lines[i][2]) == 2)
    end = next(i for i in range(multiplied, len(lines)) if len(lines[i][2]) < 2)
    body = lines[begin:end]
    total = sum(1 if len(line[2]) == 2 else fetches for line in body if len(line[2]) < 4)
    for loop in _loops(body):
        total += len(loop) * (parts if any("vmat" in line[3] for line in loop) else pages)
    return total


def _loops(lines: list[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Innermost loops, each from its label to the first line with less depth."""
    for begin, line in enumerate(lines):
        if line[1] == "LB":
            depth = len(line[2])
            end = next(
                (i for i in range(begin + 1, len(lines)) if len(lines[i][2]) < depth), len(lines)
            )
            if not any(inner[1] == "LB" for inner in lines[begin + 1 : end]):
                yield lines[begin:end]


def _length(body: list[re.Match[str]], instruction: str) -> int:
    """Number of bundles between the labels around the first such instruction; 0 if there is none."""
    first = next((i for i, line in enumerate(body) if instruction in line[3]), None)
    if first is None:
        return 0
    begin = max(i for i in range(first + 1) if body[i][1] or i == 0)
    return next((i for i in range(first, len(body)) if body[i][1]), len(body)) - begin


def measure(generation: str, case: Case) -> Iterator[dict[str, Any]]:
    """Measure the cycles of each kernel for one part of a context, or for one page to write."""
    from tests.aot.tpu import compile_layer

    groups = case.num_heads // case.num_kv_heads
    itemsize = jnp.dtype(case.page_dtype).itemsize
    heads = case.num_kv_heads, groups, case.head_dim, case.page_size, itemsize
    blocks = rule(Heads("", *heads, has_values=case.has_values))
    slot = case.num_kv_heads * (1 + case.has_values) * case.head_dim * itemsize
    size = case.page_size
    with TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        sizes = {"rows": ROWS, "tokens": 256, "pages_per_row": 64}
        compile_layer(generation, case, case.page_dtype, **sizes)
        for kernel, queries, pages in (
            ("increments", 1, blocks.part_pages),
            ("chunks", blocks.query_block, blocks.whole_pages),
        ):
            flops = 4 * queries * pages * size * case.num_heads * case.head_dim
            cycles = bundles(_schedule(folder, kernel), "vmat")
            yield _found(kernel, case, generation, pages * size * slot, flops, cycles)
        fetches, parts = (
            CONTEXT // (size * each) for each in (blocks.increment_pages, blocks.part_pages)
        )
        schedule = _schedule(folder, "increments")
        cycles = ROWS * call_bundles(schedule, fetches, CONTEXT // size, parts)
        flops = 4 * ROWS * CONTEXT * case.num_heads * case.head_dim
        found = _found("64 x 1,024", case, generation, ROWS * CONTEXT * slot, flops, cycles)
        yield found | {"waits": ROWS * fetches / (blocks.buffers - 1)}
        if not case.has_values:
            return
        if itemsize == 1:
            # To find the largest values, tokens are read in tiles of 16 in bfloat16; they are written in groups of 32.
            schedule = _schedule(folder, "write_quantised")
            cycles = size // 16 * bundles(schedule, "vmax") + size // 32 * bundles(schedule, "vrot")
            yield _found("write_quantised", case, generation, 3 * size * slot, 0, cycles)
            return
        # Tokens are read and written in groups of 16, one group per pass of the loop.
        cycles = size // 16 * bundles(_schedule(folder, "write_chunks"), "vrot")
        yield _found("write_chunks", case, generation, 2 * size * slot, 0, cycles)


def measure_states(generation: str) -> Iterator[dict[str, Any]]:
    """Measure the cycles of a chunk of the delta rule, for the heads of one program."""
    from orca_jax.kernels.linear_state.tpu_chunks import PAIRS
    from orca_jax.kernels.linear_state.triangles import CHUNK
    from tests.aot.models import DELTA_RULE
    from tests.aot.tpu import compile_states

    keys, values = DELTA_RULE.keys, DELTA_RULE.values
    heads = PAIRS * DELTA_RULE.heads // (DELTA_RULE.pairs or DELTA_RULE.heads)
    with TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        compile_states(generation, DELTA_RULE, rows=64, tokens=2048)
        cycles = bundles(_schedule(folder, "state_chunks"), "vmat")
    # Vectors in float32; products with keys, with the state, with pairs of tokens, and of the new state.
    num_bytes = 8 * CHUNK * (PAIRS * keys + heads * values)
    flops = 2 * heads * CHUNK * (2 * CHUNK * keys + 3 * keys * values + 2 * CHUNK * values)
    yield {
        "kernel": "state_chunks",
        "heads": f"delta rule, {heads} heads",
        "for": generation,
        "bytes": num_bytes,
        "flops": flops,
        "cycles": cycles,
    }


def _schedule(folder: str, kernel: str) -> str:
    """The final schedule of a kernel, as dumped by the compiler."""
    names = Path(folder).glob(f"*-{kernel}[.-]*-final_bundles.txt")
    return next(path for path in names if "analysis" not in path.name).read_text(encoding="utf-8")


def _found(
    kernel: str, case: Case, generation: str, num_bytes: int, flops: int, cycles: int
) -> dict[str, Any]:
    names = {"kernel": kernel, "heads": case.name, "for": generation}
    return {**names, "bytes": num_bytes, "flops": flops, "cycles": cycles}


def row(found: dict[str, Any]) -> list[str]:
    """Format a row of the table; the largest number of cycles bounds the kernel."""
    chip = CHIPS[found["for"]]
    cycles = {
        "schedule": found["cycles"],
        "memory": found["bytes"] / chip.bandwidth * chip.clock,
        "products": found["flops"] / chip.flops * chip.clock,
        "latency": found.get("waits", 0) * LATENCY * chip.clock,
    }
    bound = max(cycles, key=lambda name: cycles[name])
    least = max(cycles["memory"], cycles["products"])
    sizes = f"{found['bytes'] / 1024:.0f}", f"{found['flops'] / 1e6:.1f}"
    names = found["kernel"], found["heads"], found["for"]
    return [
        *names,
        *sizes,
        *(f"{x:.0f}" for x in cycles.values()),
        f"{bound}, {least / cycles[bound]:.0%}",
    ]


def measure_all(generations: Iterable[str]) -> None:
    """Measure all cases, and write each to the page when it is done."""
    for generation in generations:
        for index in range(len(CASES) + 1):
            command = [sys.executable, "-m", "tests.aot.cycles", generation, str(index)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows = [row(json.loads(line)) for line in done.stdout.splitlines()]
            write_table(MEASURED / "cycles.md", HEADER, 3, rows)


def main(names: list[str]) -> None:
    """Print one case as lines of JSON, or write the cases of some or all generations to the page."""
    match names:
        case [generation, index]:
            case = next(iter(CASES[int(index) :]), None)
            for found in measure(generation, case) if case else measure_states(generation):
                print(json.dumps(found))
        case _:
            measure_all(names or CHIPS)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
