"""The library of products on this machine, for the tests that need it."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from orca_jax.kernels.native import Library, library, load_library
from tests.project.source import ROOT

KEPT = ROOT / ".pytest_cache" / "native"
"""The folder of the library, for later runs too; its name differs with its code."""


def _found() -> Library | None:
    """One process of a run compiles the library, and the others wait for it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return load_library(str(KEPT))


FOUND = _found()
needs_library = pytest.mark.skipif(FOUND is None, reason="needs Linux, AVX2 and a C compiler")

SANITIZED = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize=alignment",
    "-fno-sanitize-recover",
)


def library_of() -> Library:
    """The library; skips the test without one."""
    if FOUND is None:
        pytest.skip("no library of products")
    return FOUND


def keep_library(folder: Path) -> None:
    """Put the library where processes with this folder of programs find it, in place of compiling their own."""
    if FOUND is not None and (KEPT / f"{FOUND.name}.so").exists():
        shutil.copy(KEPT / f"{FOUND.name}.so", folder)


def run_cases(name: str, options: tuple[str, ...], folder: Path) -> None:
    """Compile a program of this folder with these options, instead of those for this processor, and run it."""
    program = folder / "cases"
    folders = [f"-I{jax.ffi.include_dir()}", f"-I{Path(library.__file__).parent}"]
    command = ["cc", *library.OPTIONS[:3], *options, *folders, str(Path(__file__).with_name(name))]
    subprocess.run([*command, "-o", str(program), "-lm"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
