"""Options of the compiler, and compilers without them."""

import logging
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from orca_jax.assembly.resolve import cache_directory
from orca_jax.exec.compile import (
    CompileCounter,
    compile_all,
    compile_cache,
    compile_one,
    compiler_options,
)
from orca_jax.exec.program_store import ProgramStore
from orca_jax.values.platforms import platform_named
from orca_jax.values.startup import StartTimes
from tests.users import as_user, needs_root, reachable_folder

pytestmark = pytest.mark.usefixtures("no_kept_programs")


def test_one_generation_of_tpus_all_gpus_and_cpus_with_the_library_have_options() -> None:
    assert compiler_options(platform_named("cpu"), "cpu", has_library=True)
    assert compiler_options(platform_named("tpu"), "TPU7x")
    assert (
        compiler_options(platform_named("gpu"), "NVIDIA H200")
        == compiler_options(platform_named("gpu"), "NVIDIA A100-SXM4-40GB")
        != {}
    )
    others = ("tpu", "TPU v6 lite"), ("tpu", "TPU v5"), ("cpu", "cpu")
    assert not any(compiler_options(platform_named(name), kind) for name, kind in others)


def test_an_option_unknown_to_xla_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with caplog.at_level(logging.WARNING):
        program = compile_one(lowered, {"xla_no_such_option": False})
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert "xla_no_such_option" in caplog.text


def test_a_wrong_value_of_an_option_is_an_error() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_one(lowered, {"xla_dump_max_hlo_modules": True})


def compiled_in(directory: str) -> jax.Array:
    with compile_cache(directory):
        return jax.jit(lambda x: x * 3)(jnp.ones(2))


@pytest.mark.parametrize("place", ["file/below", "file"])
def test_an_unwritable_cache_is_left_out_with_a_warning(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A regular file stands where a directory is needed: neither root nor the owner can write there."""
    (tmp_path / "file").write_text("not a directory")
    before = jax.config.jax_compilation_cache_dir
    with caplog.at_level(logging.WARNING):
        assert compiled_in(str(tmp_path / place)).tolist() == [3, 3]
    (record,) = caplog.records
    assert (
        str(tmp_path / place) in record.getMessage() and "cannot be written" in record.getMessage()
    )
    assert jax.config.jax_compilation_cache_dir == before


def test_a_read_only_cache_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of containers hold such caches. JAX's warnings about each new program are left out."""
    compiled_in(str(tmp_path))
    entries = sorted(path.name for path in tmp_path.iterdir())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("orca_jax.exec.compile.tempfile.TemporaryFile", refuse)
    with caplog.at_level(logging.WARNING), compile_cache(str(tmp_path)):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        warnings.warn("Error writing persistent compilation cache entry for 'x'", stacklevel=1)
    assert "Permission denied" in caplog.text and entries


@needs_root
def test_a_cache_that_cannot_be_reached_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with reachable_folder() as folder, caplog.at_level(logging.WARNING):
        folder.chmod(0o700)
        with as_user(10001, 10001, []):
            directory = cache_directory(str(folder))
            assert directory is not None and compiled_in(directory).tolist() == [3, 3]
    assert "cannot be written: Permission denied" in caplog.text


def test_programs_that_others_could_have_written_are_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_in(str(tmp_path))
    for path in tmp_path.iterdir():
        path.chmod(0o666)
    counter = CompileCounter()
    with caplog.at_level(logging.WARNING):
        compiled_in(str(tmp_path))
    counter.close()
    assert counter.count > counter.from_cache == 0 and "all users can write to it" in caplog.text


def test_a_file_of_others_that_stays_means_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    (tmp_path / "program").touch()
    (tmp_path / "program").chmod(0o666)
    monkeypatch.setattr("orca_jax.helpers.cache_files.os.unlink", refuse)
    before = jax.config.jax_compilation_cache_dir
    with caplog.at_level(logging.WARNING), compile_cache(str(tmp_path)):
        assert jax.config.jax_compilation_cache_dir == before
    assert "must be removed first" in caplog.text and str(tmp_path / "program") in caplog.text


def test_programs_from_the_cache_are_counted(tmp_path: Path) -> None:
    x = jnp.ones(5)
    found = []
    for _ in range(2):
        counter = CompileCounter()
        with compile_cache(str(tmp_path)):
            compile_one(jax.jit(lambda x: x * 7).lower(x), {})
        found.append((counter.count, counter.from_cache))
        counter.close()
    assert found == [(1, 0), (1, 1)]


def test_an_error_in_progress_ends_the_tracing() -> None:
    """A start that has failed elsewhere needs no more programs."""
    traced: list[int] = []

    def lowering(number: int) -> jax.stages.Lowered:
        traced.append(number)
        return jax.jit(lambda x: x + number).lower(jnp.ones(3))

    def progress(done: int, total: int) -> None:
        if len(traced) == 2:
            raise InterruptedError

    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    lower = {("layers", number): partial(lowering, number) for number in range(5)}
    with pytest.raises(InterruptedError):
        compile_all(lower, {}, ProgramStore(None, mesh, None), progress, StartTimes())
    assert traced == [0, 1]
