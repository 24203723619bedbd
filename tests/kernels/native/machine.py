"""The library of products on this machine, for the tests that need it."""

import subprocess
from pathlib import Path

import jax
import pytest

from orca_jax.kernels.native import Library, library, load_library
from tests.project.source import ROOT

# for later runs too; its name differs with its code
FOUND = load_library(str(ROOT / ".pytest_cache" / "native"))
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


def run_cases(name: str, options: tuple[str, ...], folder: Path) -> None:
    """Compile a program of this folder with these options, instead of those for this processor, and run it."""
    program = folder / "cases"
    folders = [f"-I{jax.ffi.include_dir()}", f"-I{Path(library.__file__).parent}"]
    command = ["cc", *library.OPTIONS[:3], *options, *folders, str(Path(__file__).with_name(name))]
    subprocess.run([*command, "-o", str(program), "-lm"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
