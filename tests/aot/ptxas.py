"""The report of `ptxas` about the kernels that it assembles, through a wrapper in front of it in PATH."""

import re
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from tests.aot.compilers import CUDA

_WRAPPER = """#!/bin/sh
case "$1" in -*) ;; *) cp "$1" {folder}/$$.ptx ;; esac
{ptxas} -v "$@" 2> {folder}/$$.log
code=$?
cat {folder}/$$.log >&2
exit $code
"""
_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'"
    r".*?(?P<spilled>\d+) bytes spill stores"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Assembled:
    """A kernel assembled by `ptxas`."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    ptx: str = ""  # the text that was assembled


def write_wrapper(folder: Path) -> None:
    """Write a minimal CUDA toolkit for XLA to the folder; its `ptxas` calls the real one, and keeps PTX and report.

    The `ptxas` of `.compilers` has precedence over the machine's, so that the numbers do not depend on the machine.
    """
    ptxas = shutil.which(CUDA / "bin" / "ptxas") or shutil.which("ptxas")
    assert ptxas is not None
    wrapper = folder / "bin" / "ptxas"
    wrapper.parent.mkdir()
    if CUDA.is_dir():
        (folder / "nvvm").symlink_to(CUDA / "nvvm")
    wrapper.write_text(_WRAPPER.format(ptxas=ptxas, folder=folder), encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)


def take(folder: Path) -> list[Assembled]:
    """Return all kernels assembled since the last call."""
    found: list[Assembled] = []
    for log in sorted(folder.glob("*.log")):
        source = log.with_suffix(".ptx")
        ptx = source.read_text(encoding="utf-8") if source.exists() else ""
        found += [replace(kernel, ptx=ptx) for kernel in read(log.read_text(encoding="utf-8"))]
        log.unlink()
        source.unlink(missing_ok=True)
    return found


def read(log: str) -> list[Assembled]:
    """Parse the report of one call."""
    return [
        Assembled(match["name"], int(match["registers"]), int(match["spilled"]))
        for match in _KERNEL.finditer(log)
    ]
