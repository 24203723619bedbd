"""Programs on disk: found for equal facts only, and never a reason to fail."""

import logging
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from orca_jax.exec import program_store
from orca_jax.exec.compile import CompileCounter, compile_all, compile_cache
from orca_jax.exec.program_store import ProgramStore, name_suffix
from orca_jax.helpers.bundled import digest_of
from orca_jax.model.load import tensor_mesh
from orca_jax.values.startup import StartTimes

pytestmark = pytest.mark.usefixtures("no_kept_programs")


@pytest.fixture(autouse=True)
def with_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "code_digest", lambda: "code")


@pytest.fixture
def mesh() -> Mesh:
    return tensor_mesh(jax.devices()[:1])


def compiled(factor: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: x * factor).lower(jnp.ones(3)).compile()


def stored(directory: Path) -> list[Path]:
    return sorted((directory / "executables").iterdir())


def test_a_stored_program_runs_without_a_compilation(tmp_path: Path, mesh: Mesh) -> None:
    ProgramStore(str(tmp_path), mesh, "facts").save("double-1", compiled(2))
    x = jnp.ones(3)
    counter = CompileCounter()
    program = ProgramStore(str(tmp_path), mesh, "facts").load("double-1")
    assert program is not None and program(x).tolist() == [2, 2, 2]
    assert counter.count == 0
    counter.close()


def test_other_facts_devices_or_code_find_nothing(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProgramStore(str(tmp_path), mesh, ("facts", 1)).save("double-1", compiled(2))
    assert ProgramStore(str(tmp_path), mesh, ("facts", 1)).load("double-1") is not None
    assert ProgramStore(str(tmp_path), mesh, ("facts", 2)).load("double-1") is None
    assert ProgramStore(str(tmp_path), mesh, ("facts", 1)).load("double-2") is None
    assert (
        ProgramStore(str(tmp_path), tensor_mesh(jax.devices()[:2]), ("facts", 1)).load("double-1")
        is None
    )
    assert (
        ProgramStore(str(tmp_path), tensor_mesh(jax.devices()[1:2]), ("facts", 1)).load("double-1")
        is None
    )
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert ProgramStore(str(tmp_path), mesh, ("facts", 1)).load("double-1") is None
    with jax.default_matmul_precision("highest"):
        assert ProgramStore(str(tmp_path), mesh, ("facts", 1)).load("double-1") is None
    monkeypatch.setattr(program_store, "code_digest", lambda: "other code")
    assert ProgramStore(str(tmp_path), mesh, ("facts", 1)).load("double-1") is None


def test_the_digest_depends_on_every_source_file(tmp_path: Path) -> None:
    assert digest_of(tmp_path) is None
    (tmp_path / "a.py").write_text("x = 1")
    first = digest_of(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.py").write_text("")
    second = digest_of(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    third = digest_of(tmp_path)
    (tmp_path / "folder" / "b.py").rename(tmp_path / "b.py")
    assert len({first, second, third, digest_of(tmp_path)}) == 4


def test_measurements_are_kept_beside_the_programs(tmp_path: Path, mesh: Mesh) -> None:
    store = ProgramStore(str(tmp_path), mesh, "facts")
    assert store.read("times") is None
    store.write("times", b"some")
    assert (
        store.read("times") == b"some"
        and ProgramStore(str(tmp_path), mesh, "others").read("times") is None
    )
    (file,) = stored(tmp_path)
    file.write_bytes(b"damaged")
    assert store.read("times") is None
    nowhere = ProgramStore(None, mesh, "facts")
    nowhere.write("times", b"some")
    assert nowhere.read("times") is None


def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProgramStore(str(tmp_path), mesh, "facts")
    store.save("double-1", compiled(2))
    (path,) = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert store.load("double-1") is None
    assert str(path) in caplog.text and "compiled again" in caplog.text
    store.save("double-1", compiled(2))
    assert store.load("double-1") is not None


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "executables").write_text("not a directory")
    for directory in (str(tmp_path), str(tmp_path / "absent"), None):
        store = ProgramStore(directory, mesh, "facts")
        store.save("double-1", compiled(2))
        assert store.load("double-1") is None
    assert os.listdir(tmp_path) == ["executables"]


def test_stored_programs_are_not_traced(tmp_path: Path, mesh: Mesh) -> None:
    traced: list[int] = []

    def lower(factor: int) -> jax.stages.Lowered:
        traced.append(factor)
        return jax.jit(lambda x: x * factor).lower(jnp.ones(3))

    def run() -> list[list[float]]:
        before = list(traced)
        done: list[tuple[int, int]] = []
        programs = compile_all(
            {("times", factor): partial(lower, factor) for factor in (2, 3)},
            {},
            ProgramStore(str(tmp_path), mesh, "facts"),
            lambda *counts: done.append(counts),
            times := StartTimes(),
        )
        report = times.report()
        assert report.programs == 2 and report.from_cache == 2 - len(traced[len(before) :])
        # a count may come again, before a tracing
        assert list(dict.fromkeys(done)) == [(0, 2), (1, 2), (2, 2)]
        return [programs["times", factor](jnp.ones(2 + 1)).tolist() for factor in (2, 3)]

    assert run() == [[2, 2, 2], [3, 3, 3]] and traced == [2, 3]
    (tmp_path / "executables" / stored(tmp_path)[0].name).unlink()
    assert run() == [[2, 2, 2], [3, 3, 3]] and traced == [2, 3, 2]
    assert run() == [[2, 2, 2], [3, 3, 3]] and traced == [2, 3, 2]


def test_an_error_of_a_compilation_is_raised(tmp_path: Path, mesh: Mesh) -> None:
    def fail() -> jax.stages.Lowered:
        raise ValueError("cannot be traced")

    with pytest.raises(ValueError, match="cannot be traced"):
        compile_all(
            {("bad", 1): fail},
            {},
            ProgramStore(str(tmp_path), mesh, "facts"),
            lambda *_: None,
            StartTimes(),
        )


def test_a_program_from_the_cache_of_jax_is_not_stored(tmp_path: Path, mesh: Mesh) -> None:
    """XLA:CPU writes it without its functions, and it would fail at its first run."""
    lower = {("times", 5): lambda: jax.jit(lambda x: jnp.sin(x) * 5).lower(jnp.ones(3))}
    numbers = []
    for attempt in ("first", "second"):
        times = StartTimes()
        store = ProgramStore(str(tmp_path / attempt), mesh, "facts")
        (tmp_path / attempt).mkdir()
        with compile_cache(str(tmp_path / "of jax")):
            programs = compile_all(lower, {}, store, lambda *_: None, times)
        assert programs["times", 5](jnp.zeros(3)).tolist() == [0, 0, 0]
        numbers.append((times.report().from_cache, (tmp_path / attempt / "executables").exists()))
    assert numbers == [(0, True), (1, False)]


def test_the_cache_of_jax_has_no_programs_of_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hits(code: str | None) -> int:
        monkeypatch.setattr(program_store, "code_digest", lambda: code)

        def program(x: jax.Array) -> jax.Array:
            return jnp.cos(x) * 11

        program.__name__ += name_suffix()
        lowered = jax.jit(program).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
        counter = CompileCounter()
        with compile_cache(str(tmp_path)):
            lowered.compile()
        counter.close()
        return counter.from_cache

    assert [hits(code) for code in ("one", "one", "two", None, None)] == [0, 1, 0, 0, 1]
