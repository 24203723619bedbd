"""Alignment of the tensor copies in PTX: `ptxas` accepts shared addresses at which the hardware faults."""

import math
import re
from collections import defaultdict

TENSOR_ALIGNMENT = 128  # bytes; of every address in shared memory used by `cp.async.bulk.tensor`

_LARGEST = 1 << 30
_DEFINED = re.compile(r"^(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%r\d+|%rd\d+),\s*([^;{}]+);")
_COPY = re.compile(
    r"cp\.async\.bulk\.tensor\S*(?P<space>global\.shared|shared::(?:cta|cluster)\.global)\S*\s+(?P<rest>.*);"
)
_PLACE = re.compile(r"\[\s*(%r\d+)\s*\]")
# a kernel's dynamic memory, aligned as swizzled copies need it
_DYNAMIC = ("__dynamic_shmem__", 1024)


def tensor_addresses(ptx: str) -> list[tuple[str, int]]:
    """Each tensor copy of a kernel, with the largest power of two that must divide its address in shared memory."""
    known = _alignments(ptx)
    found = []
    for line in ptx.splitlines():
        if copy := _COPY.search(line):
            places = _PLACE.findall(copy["rest"])
            register = places[-1] if copy["space"].startswith("global") else places[0]
            found.append((line.strip(), known[register]))
    return found


def _alignments(ptx: str) -> dict[str, int]:
    """For each register, the largest power of two that divides every value assigned to it, as far as can be seen."""
    statements = [
        match.groups() for line in ptx.splitlines() if (match := _DEFINED.match(line.strip()))
    ]
    # registers in loops depend on themselves: start from the top
    known: dict[str, int] = defaultdict(lambda: _LARGEST)
    while True:
        before = dict(known)
        for operation, register, operands in statements:
            values = [_of_operand(text.strip(), known) for text in operands.split(",")]
            known[register] = math.gcd(known[register], _result(operation, values, operands))
        if known == before:
            return known


def _of_operand(text: str, known: dict[str, int]) -> int:
    if text.startswith("%r"):
        return known[text]
    if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", text):
        value = abs(int(text, 0))
        return value & -value or _LARGEST
    return _DYNAMIC[1] if text.startswith(_DYNAMIC[0]) else 1


def _result(operation: str, values: list[int], operands: str) -> int:
    name = operation.split(".")[0]
    if name in ("mov", "cvt", "cvta", "shfl"):
        return values[0]
    if name in ("add", "sub", "or", "xor", "min", "max", "selp"):
        return math.gcd(*values[:2])
    if name == "and":
        return max(values[:2])
    if name == "mul" and ".hi" not in operation:
        return min(_LARGEST, values[0] * values[1])
    if name == "mad":
        return math.gcd(min(_LARGEST, values[0] * values[1]), values[2])
    if name == "shl" and (shift := re.fullmatch(r".*,\s*(\d+)", operands)):
        return min(_LARGEST, values[0] << int(shift[1]))
    return 1
