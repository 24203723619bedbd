"""The C files here, compiled: for the processor of this machine, or for all processors into a wheel.

Imports the standard library alone, since the hook of the wheel (`scripts/wheel_library.py`) runs this file by itself.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-tree-reassoc", "-fPIC")
NATIVE: tuple[str, ...] = ("-march=native",)
COMPILE_SECONDS, _VERSION_SECONDS = 60.0, 10.0

PACKED_PRODUCTS = "orca_jax_packed_products"
FEW_BITS_PRODUCTS = "orca_jax_few_bits_products"
ATTENTION = "orca_jax_attention"
FUNCTIONS = {
    "attention": (ATTENTION,),
    "few_bits": (FEW_BITS_PRODUCTS,),
    "product": (PACKED_PRODUCTS, "orca_jax_width", "orca_jax_ask_for_amx"),
}
"""The functions of each C file."""

NEEDED = ("avx2", "fma", "f16c")
_AVX512 = (*NEEDED, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BFLOAT16 = (*_AVX512, "avx512_bf16")
LEVELS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "attention": (NEEDED, _AVX512, _BFLOAT16),
    "few_bits": (NEEDED, _AVX512, (*_AVX512, "avx512_vnni")),
    "product": (NEEDED, _AVX512, _BFLOAT16, (*_BFLOAT16, "amx_tile", "amx_bf16")),
}
"""The extensions for which a wheel has each C file, by Linux's names. The first ones are those that each file needs."""


class Compilation(NamedTuple):
    """A C file and how it is compiled."""

    source: str
    options: tuple[str, ...]
    level: int | None = None  # its functions have this number behind their names


def native_parts() -> list[Compilation]:
    """Return the parts of a library for the processor of this machine."""
    return [Compilation(source, NATIVE) for source in LEVELS]


def wheel_parts() -> list[Compilation]:
    """Return the parts of a library for all processors."""
    parts: list[Compilation] = []
    for source, levels in LEVELS.items():
        for number, level in enumerate(levels):
            parts.append(Compilation(source, tuple(map(_option, level)), number))
    return parts


def names_for(flags: Collection[str]) -> dict[str, str]:
    """Return the functions in a library of a wheel for a processor with these extensions, by their names in C."""
    names: dict[str, str] = {}
    for source, levels in LEVELS.items():
        number = max(number for number, level in enumerate(levels) if set(level) <= set(flags))
        names |= {function: f"{function}_{number}" for function in FUNCTIONS[source]}
    return names


def wheel_file() -> Path:
    """Return the place of the library that a wheel may have for these C files."""
    digest = hashlib.sha256(repr((source_texts(), OPTIONS, LEVELS)).encode()).hexdigest()[:16]
    return SOURCES / f"built-{digest}.so"


def sealed(library: bytes) -> bytes:
    """Return the content of the file of a wheel: a library, and then its digest."""
    return library + hashlib.sha256(library).digest()


def unsealed(content: bytes) -> bytes:
    """Return the library in the file of a wheel. One that was cut would end the process.

    Raises:
        ValueError: it is not whole.
    """
    library = content[: -hashlib.sha256().digest_size]
    if sealed(library) != content:
        raise ValueError("it is not whole")
    return library


def source_texts() -> list[bytes]:
    """Return the content of all C files, in the order of their names."""
    return [file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]"))]


def found_compiler() -> str | None:
    """Return the C compiler of this machine; None if it has none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def version(compiler: str) -> str:
    """Return a digest of the compiler's version. Its path may stay the same when it is replaced by a newer one."""
    first = (
        _run([compiler, "--version"], _VERSION_SECONDS)
        .partition("\n")[0]
        .removeprefix(Path(compiler).name)
    )
    return hashlib.sha256(first.encode()).hexdigest()[:8]


def compiled(
    compiler: str, parts: Sequence[Compilation], include: str, folder: Path | None
) -> bytes:
    """Return a new library. It is made in the folder, or in the temporary one: either may be full or closed.

    Args:
        compiler: path of the C compiler.
        parts: C files, each compiled by a process of its own.
        include: folder with the headers of XLA.
        folder: is made if it is absent; None for the temporary one.

    Raises:
        OSError: neither folder can be written.
        SubprocessError: the compiler failed, or took too long.
    """
    try:
        return _compiled_in(compiler, parts, include, folder)
    except (OSError, subprocess.CalledProcessError):
        if folder is None:
            raise
        return _compiled_in(compiler, parts, include, None)


def _compiled_in(
    compiler: str, parts: Sequence[Compilation], include: str, folder: Path | None
) -> bytes:
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as beside:
        # The compiler's own files go there too: a container may have no other folder that can be written.
        command = ["env", f"TMPDIR={beside}", compiler, *OPTIONS]
        objects = [f"{beside}/{part.source}{part.level}.o" for part in parts]
        lines = [
            [
                *command,
                *_options(part),
                f"-I{include}",
                "-c",
                str(SOURCES / f"{part.source}.c"),
                "-o",
                made,
            ]
            for part, made in zip(parts, objects, strict=True)
        ]
        with ThreadPoolExecutor(min(len(lines), os.cpu_count() or 1)) as threads:
            list(threads.map(partial(_run, seconds=COMPILE_SECONDS), lines))
        library = Path(beside) / "native.so"
        _run([*command, "-shared", "-s", *objects, "-o", str(library)], COMPILE_SECONDS)
        return library.read_bytes()


def _options(part: Compilation) -> list[str]:
    names = () if part.level is None else FUNCTIONS[part.source]
    return [*part.options, *(f"-D{name}={name}_{part.level}" for name in names)]


def _option(extension: str) -> str:
    return "-m" + extension.replace("amx_", "amx-").replace("_", "")


def _run(command: list[str], seconds: float) -> str:
    """The output of a command. At the end of its time it ends, and so do all processes that it has started.

    Raises:
        SubprocessError: it failed, or its time is over.
    """
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
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
