"""The library of the C files here: compiled by the C compiler of this machine, once for each processor, and registered.

XLA's own products on a CPU arrange the matrix anew in each launch, and no form of plain XLA reads a matrix once at the
memory's speed (docs/decisions.md, "Launches and programs"). Attention of increments by XLA is many small operations
for each page. Without a compiler, XLA does both.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orca_jax.cache_files import read_file, write_file
from orca_jax.processor import all_cpu_flags, cpu_name

logger = logging.getLogger(__name__)

PACKED_PRODUCTS = "orca_jax_packed_products"
FEW_BITS_PRODUCTS = "orca_jax_few_bits_products"
ATTENTION = "orca_jax_attention"
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS: tuple[str, ...] = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC")
_NEEDED = frozenset({"avx2", "fma", "f16c"})  # extensions of the processor, at least
_COMPILE_SECONDS, _VERSION_SECONDS = 60.0, 10.0
_SOURCES = Path(__file__).parent
_TARGETS = (PACKED_PRODUCTS, FEW_BITS_PRODUCTS, ATTENTION)
_FUNCTIONS = (
    *_TARGETS, "orca_jax_width", "orca_jax_has_bfloat16", "orca_jax_ask_for_amx",
)  # fmt: skip
_MEMORY_NAME = "orca-jax-native"


class _AbsentError(Exception):
    """The reason why this machine has no library."""


class Library(NamedTuple):
    """The compiled library, and the shapes that it multiplies."""

    width: int  # columns of a block of a packed matrix
    has_bfloat16: bool
    has_amx: bool = False  # for packed matrices in bfloat16
    name: str = "native"  # differs with its code, the processor, the version of JAX and that of the compiler
    narrows: bool = False  # activations have 16 bits in products of few bits, also beside weights in float32


_registered: list[Library] = []  # one at most
_lock = threading.Lock()


def load_library(directory: str | None) -> Library | None:
    """Compile the library if no earlier start has, register it, and return it; None if this machine has none.

    The log has the reason if it is None.

    Args:
        directory: keeps the library, as it keeps compiled programs; None compiles it at each start, and so does one
            that cannot be written. The first library of a process serves all its engines.
    """
    try:
        return require_library(directory)
    except _AbsentError as error:
        logger.info("products are those of XLA, since the library in C is not used: %s", error)
    except (OSError, subprocess.SubprocessError, jax.errors.JaxRuntimeError) as error:
        logger.warning("products are those of XLA, since the library in C cannot be used: %s", _last_line(error))
    return None


def require_library(directory: str | None) -> Library:
    """As `load_library`, but raise the reason of a failure. A call while another thread compiles waits for it."""
    with _lock:
        if not _registered:
            _check_machine()
            _registered.append(_register(*_open(_compiler(), directory)))
        return _registered[0]


def _check_machine() -> None:
    """Raise _AbsentError on a machine without the instructions of the library."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise _AbsentError(f"it needs Linux on x86, and this is {sys.platform} on {platform.machine()}")
    if lacking := _NEEDED.difference(all_cpu_flags()):
        raise _AbsentError(f"the processor has no {' and no '.join(sorted(lacking))}")


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _register(library: ctypes.CDLL, name: str) -> Library:
    """Make the products known to XLA, which takes each name once."""
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library[target]), platform="cpu")
    types = bool(library.orca_jax_has_bfloat16()), bool(library.orca_jax_ask_for_amx())
    return Library(library.orca_jax_width(), *types, name)


def _open(compiler: str | None, directory: str | None) -> tuple[ctypes.CDLL, str]:
    """Open the library of the directory, or compile it. Return it with its name.

    A new library is kept if the directory can be written. Without a compiler the newest library of this code, processor
    and version of JAX is opened.

    Raises:
        _AbsentError: there is no compiler, and no library is kept.
    """
    folder, stem = None if directory is None else Path(directory), f"native-{_facts()}"
    name = stem if compiler is None else f"{stem}-{_version(compiler)}"
    if folder is not None:
        files = [folder / f"{name}.so"] if compiler is not None else _newest_first(folder.glob(f"{stem}-*.so"))
        for file in files:
            if (library := _kept(file)) is not None:
                return library, file.stem
    if compiler is None:
        raise _AbsentError(f"no C compiler is installed ({', '.join(_COMPILERS)}), and none is kept in {directory}")
    content = _compiled(compiler, folder)
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(folder / f"{name}.so", content)
    return _loaded(content), name


def _facts() -> str:
    """A digest of everything that the library follows from, apart from the compiler."""
    sources = [file.read_bytes() for file in sorted(_SOURCES.glob("*.[ch]"))]
    facts = sources, _OPTIONS, cpu_name(), all_cpu_flags(), jax.__version__
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _version(compiler: str) -> str:
    """A digest of the compiler's version. Its path may stay the same when it is replaced by a newer one."""
    first = _run([compiler, "--version"], _VERSION_SECONDS).partition("\n")[0].removeprefix(Path(compiler).name)
    return hashlib.sha256(first.encode()).hexdigest()[:8]


def _newest_first(files: Iterable[Path]) -> list[Path]:
    dated: list[tuple[float, Path]] = []
    for file in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            dated.append((file.stat().st_mtime, file))
    return [file for _, file in sorted(dated, reverse=True)]


def _kept(file: Path) -> ctypes.CDLL | None:
    """A kept library; None if there is none, or one that must not be used. The log names a bad one."""
    try:
        library = _loaded(read_file(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
        if not missing:
            return library
        reason = f"it has no function {missing[0]}"
    logger.warning("the library in C %s is not used: %s; it is compiled again if there is a compiler", file, reason)
    return None


def _loaded(content: bytes) -> ctypes.CDLL:
    """A library from memory: a file that is cut while it is in use would end the process."""
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(_MEMORY_NAME)  # stays open: a path in use would give the library loaded from there
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        return ctypes.CDLL(file.name)  # it stays open when its file is removed


def _compiled(compiler: str, folder: Path | None) -> bytes:
    """A new library. It is made in the folder, and if that fails in the temporary one: either may be full or closed."""
    try:
        return _compiled_in(compiler, folder)
    except (OSError, subprocess.CalledProcessError):
        if folder is None:
            raise
        return _compiled_in(compiler, None)


def _compiled_in(compiler: str, folder: Path | None) -> bytes:
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as beside:
        # The compiler's own files go there too: a container may have no other folder that can be written.
        command = ["env", f"TMPDIR={beside}", compiler, *_OPTIONS, f"-I{jax.ffi.include_dir()}"]
        parts = {str(source): f"{beside}/{source.stem}.o" for source in _SOURCES.glob("*.c")}
        lines = [[*command, "-c", source, "-o", part] for source, part in parts.items()]
        with ThreadPoolExecutor(len(lines)) as threads:
            list(threads.map(partial(_run, seconds=_COMPILE_SECONDS), lines))
        made = Path(beside) / "native.so"
        _run([*command, "-shared", *sorted(parts.values()), "-o", str(made)], _COMPILE_SECONDS)
        return made.read_bytes()


def _run(command: list[str], seconds: float) -> str:
    """The output of a command. At the end of its time it ends, and so do all processes that it has started.

    Raises:
        SubprocessError: it failed, or its time is over.
    """
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return str(output)


def _last_line(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return text.strip().splitlines()[-1] if text.strip() else type(error).__name__
