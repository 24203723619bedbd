"""The library of the C files here, registered: from the wheel, or made by the C compiler of this machine.

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
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orca_jax.helpers.cache_files import read_file, write_file
from orca_jax.helpers.processor import all_cpu_flags, cpu_name
from orca_jax.kernels.native.compiler import (
    ATTENTION,
    COMPILERS,
    FEW_BITS_PRODUCTS,
    FUNCTIONS,
    NEEDED,
    OPTIONS,
    PACKED_PRODUCTS,
    compiled,
    found_compiler,
    names_for,
    native_parts,
    source_texts,
    unsealed,
    version,
    wheel_file,
)

logger = logging.getLogger(__name__)

_TARGETS = (PACKED_PRODUCTS, FEW_BITS_PRODUCTS, ATTENTION)
_NAMES = {name: name for name in chain.from_iterable(FUNCTIONS.values())}
_MEMORY_NAME = "orca-jax-native"


class _AbsentError(Exception):
    """The reason why this machine has no library."""


class _Opened(NamedTuple):
    """A library in this process."""

    functions: Mapping[str, Any]  # by their names in C
    name: str


class Library(NamedTuple):
    """The compiled library, and the shapes that it multiplies."""

    width: int  # columns of a block of a packed matrix
    has_amx: bool = False  # for packed matrices in bfloat16
    # differs with its code, the processor, the version of JAX and that of the compiler
    name: str = "native"
    # in products of few bits, 16 or 8; 0: float32, or 16 bits beside weights in bfloat16
    activation_bits: int = 0


_registered: list[Library] = []  # one at most
_lock = threading.Lock()


def load_library(directory: str | None) -> Library | None:
    """Find the library or compile it, register it, and return it; None if this machine has none.

    The log has the reason if it is None.

    Args:
        directory: keeps a library that is compiled, as it keeps compiled programs; None compiles it at each start, and
            so does one that cannot be written. The first library of a process serves all its engines.
    """
    try:
        return require_library(directory)
    except _AbsentError as error:
        logger.info("products are those of XLA, since the library in C is not used: %s", error)
    except (OSError, subprocess.SubprocessError, jax.errors.JaxRuntimeError) as error:
        logger.warning(
            "products are those of XLA, since the library in C cannot be used: %s",
            _last_line(error),
        )
    return None


def require_library(directory: str | None) -> Library:
    """As `load_library`, but raise the reason of a failure. A call while another thread compiles waits for it."""
    with _lock:
        if not _registered:
            _check_machine()
            _registered.append(_register(_from_wheel() or _open(found_compiler(), directory)))
        return _registered[0]


def _check_machine() -> None:
    """Raise _AbsentError on a machine without the instructions of the library."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise _AbsentError(
            f"it needs Linux on x86, and this is {sys.platform} on {platform.machine()}"
        )
    if lacking := set(NEEDED).difference(all_cpu_flags()):
        raise _AbsentError(f"the processor has no {' and no '.join(sorted(lacking))}")


def _register(opened: _Opened) -> Library:
    """Make the products known to XLA, which takes each name once."""
    found = opened.functions
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(found[target]), platform="cpu")
    return Library(found["orca_jax_width"](), bool(found["orca_jax_ask_for_amx"]()), opened.name)


def _from_wheel() -> _Opened | None:
    """The library of these C files that came with this package; None if there is none. The log names a bad one."""
    file = wheel_file()
    if not file.exists():
        return None
    try:
        made = _loaded(unsealed(file.read_bytes()))
        return _Opened(_functions(made, names_for(all_cpu_flags())), f"native-{_facts()}-built")
    except (OSError, ValueError) as error:
        logger.warning("the library in C %s of this package is not used: %s", file, error)
        return None


def _open(compiler: str | None, directory: str | None) -> _Opened:
    """Open the library of the directory, or compile it.

    A new library is kept if the directory can be written. Without a compiler the newest library of this code, processor
    and version of JAX is opened.

    Raises:
        _AbsentError: there is no compiler, and no library is kept.
    """
    folder = None if directory is None else Path(directory)
    stem = f"native-{_facts()}"
    name = stem if compiler is None else f"{stem}-{version(compiler)}"
    if folder is not None:
        files = [folder / f"{name}.so"]
        if compiler is None:
            files = _newest_first(folder.glob(f"{stem}-*.so"))
        for file in files:
            if (functions := _kept(file)) is not None:
                return _Opened(functions, file.stem)
    if compiler is None:
        reason = f"no C compiler is installed ({', '.join(COMPILERS)}), none is kept in {directory}"
        raise _AbsentError(f"{reason}, and none came with this package")
    content = _compiled(compiler, folder)
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(folder / f"{name}.so", content)
    return _Opened(_functions(_loaded(content), _NAMES), name)


def _compiled(compiler: str, folder: Path | None) -> bytes:
    return compiled(compiler, native_parts(), jax.ffi.include_dir(), folder)


def _functions(library: ctypes.CDLL, names: Mapping[str, str]) -> Mapping[str, Any]:
    """The functions of a library, by their names in C. Raises ValueError if one is missing."""
    if missing := [name for name in names.values() if not hasattr(library, name)]:
        raise ValueError(f"it has no function {missing[0]}")
    return {function: library[name] for function, name in names.items()}


def _facts() -> str:
    """A digest of everything that the library follows from, apart from the compiler."""
    facts = source_texts(), OPTIONS, cpu_name(), all_cpu_flags(), jax.__version__
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _newest_first(files: Iterable[Path]) -> list[Path]:
    dated: list[tuple[float, Path]] = []
    for file in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            dated.append((file.stat().st_mtime, file))
    return [file for _, file in sorted(dated, reverse=True)]


def _kept(file: Path) -> Mapping[str, Any] | None:
    """Functions of a kept library; None if there is none, or one that must not be used. The log names a bad one."""
    try:
        return _functions(_loaded(read_file(file)), _NAMES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        message = "the library in C %s is not used: %s; it is compiled again if there is a compiler"
        logger.warning(message, file, error)
        return None


def _loaded(content: bytes) -> ctypes.CDLL:
    """A library from memory: a file that is cut while it is in use would end the process."""
    with contextlib.suppress(OSError):
        # stays open: a path in use would give the library loaded from there
        descriptor = os.memfd_create(_MEMORY_NAME)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        return ctypes.CDLL(file.name)  # it stays open when its file is removed


def _last_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        text = error.stderr
    if not text.strip():
        return type(error).__name__
    return text.strip().splitlines()[-1]
