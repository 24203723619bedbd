"""Programs of earlier runs are found, and files of a folder stay within a limit."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache as of_jax

from orca_jax.exec.compile import CompileCounter
from tests.run.kept import KeptPrograms, SharedPrograms, remove_oldest


def test_a_program_is_whole_or_absent(tmp_path: Path) -> None:
    kept = KeptPrograms(tmp_path / "new")
    assert kept.get("program") is None
    kept.put("program", b"first")
    kept.put("program", b"second")
    assert kept.get("program") == b"second"
    assert os.listdir(tmp_path / "new") == ["program"]


def test_a_run_finds_the_programs_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_jax.reset_cache()
    monkeypatch.setattr(of_jax, "get_file_cache", lambda path: (KeptPrograms(tmp_path), path))
    found = []
    for _ in range(2):
        counter = CompileCounter()
        assert jax.jit(lambda x: x * 11)(jnp.ones(3)).tolist() == [11, 11, 11]
        found.append((counter.count > 0, counter.from_cache == counter.count))
        counter.close()
    of_jax.reset_cache()
    assert found == [(True, False), (True, True)]


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path) -> None:
    kept = KeptPrograms(tmp_path)
    for age, name in enumerate("cab"):
        kept.put(name, b"1234")
        os.utime(tmp_path / name, (100 - age, 100 - age))
    assert kept.get("b") == b"1234"
    remove_oldest(tmp_path, most=8)
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    remove_oldest(tmp_path / "absent")


def test_a_directory_of_a_run_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_jax, "get_file_cache", lambda path: (None, path))
    for kept in (None, tmp_path / "kept"):
        shared = SharedPrograms(kept)
        shared.share(tmp_path / "run")
        for path in (tmp_path / "run", tmp_path / "run" / "private"):
            cache, _ = of_jax.get_file_cache(str(path))
            assert isinstance(cache, KeptPrograms) and cache._path == (kept or path)
        assert of_jax.get_file_cache(str(tmp_path / "other")) == (None, str(tmp_path / "other"))
