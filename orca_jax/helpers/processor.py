"""The processor of this machine, as Linux describes it."""

import platform
from functools import cache
from pathlib import Path

MATRIX_FLAGS = (
    "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "amx_fp16", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Extensions that multiply bfloat16 without converting it."""


def cpu_name() -> str:
    """Return the name of the processor as the system reports it."""
    return _cpu_field("model name") or platform.processor()


def cpu_flags() -> list[str]:
    """Return the extensions of the processor for matrix products, by Linux's names; empty on other systems."""
    flags = all_cpu_flags()
    return [flag for flag in MATRIX_FLAGS if flag in flags]


def all_cpu_flags() -> list[str]:
    """Return all extensions of the processor, by Linux's names; empty on other systems."""
    return _cpu_field("flags").split() or _cpu_field("Features").split()  # x86, Arm


def _cpu_field(name: str) -> str:
    """The value of the first processor in `/proc/cpuinfo`; empty if there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.partition(":")[0].strip() == name
        ),
        "",
    )


@cache
def multiplies_bfloat16() -> bool:
    """True if the processor has products of bfloat16; others convert it, which takes longer than float32 itself."""
    return not BFLOAT16_FLAGS.isdisjoint(cpu_flags())
