"""The library of the C files here: compiled by the C compiler of this machine, once for each processor, and registered.

XLA's own products on a CPU arrange the matrix anew in each launch, and no form of plain XLA reads a matrix once at the
memory's speed (docs/benchmarks.md, "Packed products"). Attention of increments by XLA is many small operations for each
page. Without a compiler, XLA does both.
"""

import contextlib
import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import jax

from orca_jax.processor import all_cpu_flags, cpu_name

logger = logging.getLogger(__name__)

PACKED_PRODUCT = "orca_jax_packed_product"
TABLE_PRODUCT = "orca_jax_table_product"
INCREMENTS = "orca_jax_increments"
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS: tuple[str, ...] = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
_NEEDED = frozenset({"avx2", "fma"})  # extensions of the processor, at least
_COMPILE_SECONDS = 60.0


class Library(NamedTuple):
    """The compiled library, and the shapes that it multiplies."""

    width: int  # columns of a block of a packed matrix
    lanes: int  # words of four bytes in a part of a table's row
    table_rows: int  # in a block of a table
    has_bfloat16: bool
    has_amx: bool = False  # for packed matrices in bfloat16
    most_channels: int = 256  # of a head, for increments
    most_tokens: int = 1024  # of a page, likewise
    name: str = "native"  # differs with its code, its compiler and the processor


_registered: list[Library] = []  # one at most
_lock = threading.Lock()


def load_library(directory: str | None) -> Library | None:
    """Compile the library if no earlier start has, register it, and return it; None if this machine has none.

    Args:
        directory: keeps the library, as it keeps compiled programs; None compiles it at each start, and so does one
            that cannot be written. The first library of a process serves all its engines.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if sys.platform != "linux" or compiler is None or not _NEEDED.issubset(all_cpu_flags()):
        return None
    try:
        with _lock:
            if not _registered:
                _registered.append(_register(_open(compiler, directory)))
            return _registered[0]
    except (OSError, subprocess.SubprocessError, jax.errors.JaxRuntimeError) as error:
        logger.warning("products are those of XLA, since their library cannot be used: %s", _last_line(error))
        return None


def loaded_library() -> Library | None:
    """The library of this process; None before `load_library`, or if this machine has none."""
    return _registered[0] if _registered else None


def _register(library: ctypes.CDLL) -> Library:
    """Make the products known to XLA, which takes each name once."""
    for name in (PACKED_PRODUCT, TABLE_PRODUCT, INCREMENTS):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
    sizes = library.orca_jax_width(), library.orca_jax_lanes(), library.orca_jax_table_rows()
    types = bool(library.orca_jax_has_bfloat16()), bool(library.orca_jax_ask_for_amx())
    most = library.orca_jax_most_channels(), library.orca_jax_most_tokens()
    return Library(*sizes, *types, *most, Path(library._name).stem)


def _open(compiler: str, directory: str | None) -> ctypes.CDLL:
    """The library, kept in the directory if this can be written."""
    if directory is not None:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(_compiled(compiler, Path(directory))))
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(_compiled(compiler, Path(folder))))  # it stays open when its file is removed


def _compiled(compiler: str, folder: Path) -> Path:
    """The path of the library for this processor and this version of JAX."""
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    facts = [file.read_bytes() for file in files], compiler, _OPTIONS, cpu_name(), all_cpu_flags(), jax.__version__
    path = folder / f"native-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as beside:
        made = Path(beside) / path.name
        sources = [str(file) for file in files if file.suffix == ".c"]
        command = [compiler, *_OPTIONS, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        made.replace(path)
    return path


def _last_line(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return text.strip().splitlines()[-1] if text.strip() else type(error).__name__
