"""The file of the library: named, kept, checked and replaced; compilers that fail; machines that cannot have it."""

import ctypes
import logging
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from orca_jax.helpers.cache_files import read_file, write_file
from orca_jax.kernels.native import compiler as parts
from orca_jax.kernels.native import library, load_library
from tests.kernels.native.machine import FOUND, KEPT, library_of, needs_library

OTHER = "int orca_jax_other(void) { return 1; }"


@pytest.fixture(scope="module")
def content() -> bytes:
    """The library that the first process of a run compiled for this code."""
    return read_file(KEPT / f"{library_of().name}.so")


@pytest.fixture
def compiled(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The folders of all compilations; each takes no time."""
    made: list[Path | None] = []

    def compile_at_once(compiler: str, folder: Path | None) -> bytes:
        made.append(folder)
        return content

    monkeypatch.setattr(library, "_compiled", compile_at_once)
    return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no library yet, and does not register another one with XLA, which takes each name once."""
    monkeypatch.setattr(library, "_registered", [])
    monkeypatch.setattr(
        library, "_register", lambda opened: library_of()._replace(name=opened.name)
    )


def opened(folder: Path, compiler: str | None = "cc") -> None:
    found = library._open(compiler, str(folder))
    assert found.functions["orca_jax_width"]() == library_of().width


def kept(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@needs_library
def test_the_library_is_compiled_once(tmp_path: Path, compiled: list[Path | None]) -> None:
    opened(tmp_path / "programs")
    file = kept(tmp_path / "programs")
    opened(tmp_path / "programs")
    assert compiled == [tmp_path / "programs"] and kept(tmp_path / "programs") == file


@needs_library
def test_a_kept_library_is_in_memory(tmp_path: Path, compiled: list[Path | None]) -> None:
    """A mapped file that is cut while serving ends the process."""
    opened(tmp_path)
    os.truncate(kept(tmp_path), 100)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@needs_library
@pytest.mark.parametrize("memory", ["absent", "refused"])
def test_a_system_without_files_in_memory_loads_a_temporary_one(
    memory: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise OSError(38, "Function not implemented")

    def file_that_cannot_run(name: str) -> int:
        return os.open(os.devnull, os.O_RDWR)

    monkeypatch.setattr(
        library.os, "memfd_create", refuse if memory == "absent" else file_that_cannot_run
    )
    assert library._loaded(content).orca_jax_width() == library_of().width


def flipped(data: bytes) -> bytes:
    damaged = bytearray(data)
    for at in random.Random(8).sample(range(len(data)), 8):
        damaged[at] ^= 0xFF
    return bytes(damaged)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a half": lambda data: data[: len(data) // 2],
    "without its last 5,000 bytes": lambda data: data[:-5000],
    "8 bytes flipped": flipped,
    "empty": lambda data: b"",
}


@needs_library
@pytest.mark.parametrize(
    "damage", [*DAMAGES, "writable by all", "without the functions", "not a library"]
)
def test_a_library_that_must_not_be_used_is_replaced(
    damage: str,
    tmp_path: Path,
    compiled: list[Path | None],
    content: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened(tmp_path)
    file = kept(tmp_path)
    if damage in DAMAGES:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    elif damage == "writable by all":
        file.chmod(0o666)
    elif damage == "not a library":
        write_file(file, b"text")
    else:
        subprocess.run(
            ["cc", "-shared", "-x", "c", "-", "-o", str(tmp_path / "o")],
            input=OTHER,
            text=True,
            check=True,
        )
        write_file(file, (tmp_path / "o").read_bytes())
        (tmp_path / "o").unlink()
    with caplog.at_level(logging.WARNING):
        opened(tmp_path)
    assert len(compiled) == 2 and read_file(kept(tmp_path)) == content
    (message,) = caplog.messages
    assert str(file) in message and "is compiled again" in message
    opened(tmp_path)
    assert len(compiled) == 2


@needs_library
def test_a_directory_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, compiled: list[Path | None]
) -> None:
    (tmp_path / "programs").write_text("not a directory")
    opened(tmp_path / "programs")
    assert kept(tmp_path) == tmp_path / "programs"


def script(path: Path, text: str) -> str:
    """A compiler of one version that otherwise runs some commands of a shell."""
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{path.name} 1.0"; exit; fi\n{text}\n'
    )
    path.chmod(0o755)
    return str(path)


@needs_library
def test_a_full_disk_is_replaced_by_the_temporary_folder(tmp_path: Path, content: bytes) -> None:
    """A compiler writes its own files to the folder, too: `TMPDIR` may be missing in a container."""
    (tmp_path / "made.so").write_bytes(content)
    place, told = tmp_path / "programs", tmp_path / "told"
    compiler = script(
        tmp_path / "cc",
        f'echo "$TMPDIR" >> {told}\nfor out; do :; done\n'
        f'case "$out" in {place}/*) echo "No space left on device" >&2; exit 1;; esac\ncp {tmp_path}/made.so "$out"',
    )
    opened(place, compiler)
    first, second = dict.fromkeys(told.read_text(encoding="utf-8").split())
    assert first.startswith(str(place)) and not second.startswith(str(place))
    assert read_file(kept(place)) == content


@needs_library
@pytest.mark.usefixtures("machine")
def test_a_compiler_that_fails_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = script(tmp_path / "cc", "echo a bad option >&2; exit 1")
    monkeypatch.setattr(parts.shutil, "which", lambda name: compiler)
    with caplog.at_level(logging.WARNING):
        assert load_library(str(tmp_path / "programs")) is None
    assert caplog.messages == [
        "products are those of XLA, since the library in C cannot be used: a bad option"
    ]
    assert not list((tmp_path / "programs").iterdir())


@needs_library
def test_a_compiler_that_hangs_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    compiler = script(tmp_path / "cc", f"sleep 300 & echo $! > {child}; wait")
    monkeypatch.setattr(parts, "COMPILE_SECONDS", 2.0)
    begun = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        library._compiled(compiler, tmp_path)
    assert time.monotonic() - begun < 60, "no second attempt, and no wait for the child"
    state = Path(f"/proc/{int(child.read_text())}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - begun < 60
        time.sleep(0.01)


@needs_library
def test_another_version_of_the_compiler_makes_another_library(
    tmp_path: Path, compiled: list[Path | None]
) -> None:
    """At the same path; a compiler of the same version at another path makes none."""
    for name, version in (("cc", 1), ("cc", 2), ("gcc", 2)):
        compiler = tmp_path / name
        compiler.write_text(f"#!/bin/sh\necho {name} '(Debian)' {version}.0\n")
        compiler.chmod(0o755)
        opened(tmp_path / "programs", str(compiler))
    assert len(compiled) == len(list((tmp_path / "programs").iterdir())) == 2


@needs_library
@pytest.mark.usefixtures("machine")
def test_without_a_compiler_the_newest_kept_library_is_used(
    tmp_path: Path, compiled: list[Path | None], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path)
    own = kept(tmp_path)
    stem = own.stem.rpartition("-")[0]
    monkeypatch.setattr(parts.shutil, "which", lambda name: None)
    for age, version in ((300, "old"), (200, "newer"), (100, "damaged")):
        file = tmp_path / f"{stem}-{version}.so"
        write_file(file, content)
        if version == "damaged":
            file.write_bytes(content)
        os.utime(file, (time.time() - age,) * 2)
    write_file(tmp_path / "native-of-another-processor-new.so", content)
    own.unlink()
    found = load_library(str(tmp_path))
    assert found is not None and found.name == f"{stem}-newer" and len(compiled) == 1


@needs_library
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_library_of_a_wheel_comes_first(
    is_whole: bool,
    tmp_path: Path,
    compiled: list[Path | None],
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = parts.sealed(content)
    (tmp_path / "built.so").write_bytes(whole if is_whole else whole[:1000])
    monkeypatch.setattr(library, "wheel_file", lambda: tmp_path / "built.so")
    monkeypatch.setattr(library, "names_for", lambda flags: library._NAMES)
    found = load_library(str(tmp_path / "programs"))
    assert (
        found is not None
        and found.name.endswith("-built") == is_whole
        and len(compiled) == (not is_whole)
    )
    assert [
        message for message in caplog.messages if "built.so of this package is not used" in message
    ] == ([] if is_whole else caplog.messages)


def test_a_wheel_has_each_c_file_for_several_processors() -> None:
    """The functions for a processor are those with the largest set of instructions that it has."""

    def numbers(*more: str) -> list[str]:
        names = parts.names_for([*parts.NEEDED, *more])
        return [
            names[name][-1]
            for name in (parts.ATTENTION, parts.FEW_BITS_PRODUCTS, parts.PACKED_PRODUCTS)
        ]

    avx512 = "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"
    assert numbers() == numbers("avx512f", "avx512_bf16") == ["0", "0", "0"]
    assert numbers(*avx512) == ["1", "1", "1"] and numbers(*avx512, "avx512_vnni") == [
        "1",
        "2",
        "1",
    ]
    assert numbers(*avx512, "avx512_vnni", "avx512_bf16") == ["2", "2", "2"]
    assert numbers(*avx512, "amx_tile", "avx512_bf16", "amx_bf16") == ["2", "1", "3"]
    assert ("product", 3, "-mamx-bf16") in [
        (part.source, part.level, part.options[-1]) for part in parts.wheel_parts()
    ]


def test_other_c_files_have_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    first = parts.wheel_file()
    assert first.parent == parts.SOURCES and parts.wheel_file() == first
    monkeypatch.setattr(parts, "source_texts", lambda: [b"edited"])
    assert parts.wheel_file() != first


@needs_library
@pytest.mark.slow
def test_the_library_for_all_processors(tmp_path: Path) -> None:
    """It has all functions, and those for this processor are of the same width as one compiled here."""
    (tmp_path / "built.so").write_bytes(
        parts.compiled("cc", parts.wheel_parts(), jax.ffi.include_dir(), None),
    )
    made = ctypes.CDLL(str(tmp_path / "built.so"))
    for part in parts.wheel_parts():
        assert all(hasattr(made, f"{name}_{part.level}") for name in parts.FUNCTIONS[part.source])
    found = library._functions(made, parts.names_for(library.all_cpu_flags()))
    assert found["orca_jax_width"]() == library_of().width


@needs_library
def test_all_engines_of_a_process_have_the_same_library(tmp_path: Path) -> None:
    """XLA takes each name once."""
    assert load_library(str(tmp_path)) == FOUND
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("compiler", "no C compiler is installed (cc, gcc, clang), none is kept in"),
        ("flags", "the processor has no avx2 and no f16c and no fma"),
        ("system", "it needs Linux on x86, and this is darwin on"),
        ("processor", "it needs Linux on x86, and this is linux on aarch64"),
    ],
)
def test_machines_without_the_library_say_why(
    lacking: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(library.sys, "platform", "darwin" if lacking == "system" else "linux")
    monkeypatch.setattr(
        library.platform, "machine", lambda: "aarch64" if lacking == "processor" else "x86_64"
    )
    monkeypatch.setattr(
        library,
        "all_cpu_flags",
        lambda: ["sse2"] if lacking == "flags" else ["avx2", "f16c", "fma"],
    )
    if lacking == "compiler":
        monkeypatch.setattr(parts.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert load_library(str(tmp_path)) is None
    (message,) = caplog.messages
    assert message.startswith(
        f"products are those of XLA, since the library in C is not used: {reason}"
    )
    assert not list(tmp_path.iterdir())
