"""The work of a layer besides its products: `python -m tests.aot.layer v5e 4 llama-3-8b 64`, half a minute.

Reads the loop over layers in the optimised program. Prints the instructions that only move data, with their
bytes and the compiler's estimate of cycles; then the sums, with the work for chunks by itself. Kernels, gathers
and collectives have no estimate, and the estimate of a transposition is far too low. The last line is JSON.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from orca_jax.model.describe import read_model_config
from orca_jax.values.config import ModelConfig

_SIZES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
_ARRAY = re.compile(rf"({'|'.join(_SIZES)})\[([\d,]*)\]")
_LINE = re.compile(r"\s+(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_MOVES = frozenset(
    (
        "copy",
        "transpose",
        "reshape",
        "slice",
        "pad",
        "concatenate",
        "maximum",
        "convert",
        "copy_fusion",
    )
)
_FREE = frozenset(("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "broadcast"))
_SMALL = 4096  # bytes; smaller results are indices and numbers per token


@dataclass(frozen=True)
class Instruction:
    """One instruction in the body of a loop."""

    name: str
    result: str  # its type
    operations: frozenset[str]  # its own, or those fused in it
    cycles: int
    is_of_chunks: bool = False  # in a branch taken only if there are chunks

    @property
    def num_bytes(self) -> int:
        """Size of the result."""
        arrays = _ARRAY.findall(self.result)
        return sum(
            _SIZES[name] * int(np.prod([int(n) for n in sizes.split(",") if n]))
            for name, sizes in arrays
        )

    @property
    def kind(self) -> str:
        """One of "product", "small" (for indices, or a number per token), "moves" and "other"."""
        if "convolution" in self.operations or "dot" in self.operations:
            return "product"
        if self.num_bytes <= _SMALL:
            return "small"
        return "moves" if self.operations <= _MOVES else "other"


def layer_of(text: str) -> list[Instruction]:
    """The instructions of the loop with the most fusions, in order."""
    computations = {
        found[1]: part
        for part in re.split(r"\n(?=%|ENTRY)", text)
        if (found := re.match(r"(%\S+)", part))
    }
    bodies = [computations[name] for name in re.findall(r" while\(.*?body=(%[\w.-]+)", text)]
    return list(_instructions(max(bodies, key=lambda body: body.count("fusion(")), computations))


def _instructions(body: str, computations: Mapping[str, str]) -> Iterator[Instruction]:
    for line in body.splitlines():
        if (found := _LINE.match(line)) and found[3] not in _FREE:
            called = re.search(r"calls=(%[\w.-]+)", found[4])
            operations = _fused(called[1], computations) if called else frozenset([found[3]])
            cycles = re.search(r'"estimated_cycles":"(\d{1,12})"', found[4])
            yield Instruction(found[1], found[2], operations, int(cycles[1]) if cycles else 0)
            yield from (
                replace(item, is_of_chunks=True) for item in _branch(found[4], computations)
            )


def _branch(text: str, computations: Mapping[str, str]) -> list[Instruction]:
    """The instructions of the longer branch of a conditional; empty for other instructions."""
    names = re.search(r"branch_computations=\{(.*?)\}", text)
    found = (
        names[1] if names else " ".join(re.findall(r"(?:true|false)_computation=(%[\w.-]+)", text))
    )
    branches = (
        list(_instructions(computations[name], computations))
        for name in re.findall(r"%[\w.-]+", found)
    )
    return max(branches, key=len, default=[])


def _fused(name: str, computations: Mapping[str, str]) -> frozenset[str]:
    """The operations of a fusion, including the fusions in it."""
    operations: set[str] = set()
    for line in computations[name].splitlines():
        if found := _LINE.match(line):
            called = re.search(r"calls=(%[\w.-]+)", found[4])
            operations |= _fused(called[1], computations) if called else {found[3]}
    return frozenset(operations - _FREE)


def weight_bytes(model: ModelConfig, chips: int) -> int:
    """Size of the matrices of one layer on one device, in bfloat16."""
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = model.embed_dim * model.mlp_dim * (3 if model.gated_mlp else 2)
    return 2 * (attention + mlp) // chips


def main(generation: str, chips: int, preset: str, tokens: int) -> None:
    """Print the instructions that move data, their bytes and those of the weights, and the cycles of each kind."""
    from tests.aot.tpu import compile_step

    model = read_model_config(f"preset:{preset}")
    step, _ = compile_step(
        generation, chips, model, tokens=tokens, rows=64, max_model_len=1024, num_pages=256
    )
    layer = layer_of(step.text)
    for item in layer:
        if item.kind == "moves":
            kind = "chunks" if item.is_of_chunks else "      "
            print(
                f"{item.num_bytes / 1024:8.0f} KiB {item.cycles:6d} cycles  {kind}  {item.name:40s} {item.result}"
            )
    case = {"for": generation, "chips": chips, "model": preset, "tokens": tokens}
    moved, of_chunks = (
        sum(item.num_bytes for item in layer if item.kind == "moves" and item.is_of_chunks <= which)
        // 1024
        for which in (False, True)
    )
    cycles = {
        kind: sum(item.cycles for item in layer if item.kind == kind and not item.is_of_chunks)
        for kind in ("product", "small", "moves", "other")
    }
    cycles["of chunks"] = sum(item.cycles for item in layer if item.is_of_chunks)
    weights = weight_bytes(model, chips) // 1024
    print(
        json.dumps(
            {
                **case,
                "weights_kib": weights,
                "moved_kib": moved,
                "with_chunks_kib": of_chunks,
                "cycles": cycles,
            }
        )
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
