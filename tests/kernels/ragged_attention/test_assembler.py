"""The assembler's version decides whether the Hopper kernels may run; the runtime of CUDA 12.9.1 is that of 12.9.0."""

from pathlib import Path

import pytest

from orca_jax.kernels.ragged_attention.hopper import assembler
from orca_jax.kernels.ragged_attention.hopper.assembler import (
    find_ptxas,
    ptxas_version,
    refusal_of_assembler,
)

ANSWER = "ptxas: NVIDIA (R) Ptx optimizing assembler\\nCuda compilation tools, release 12.9, V{version}\\n"


def toolkit(folder: Path, version: str) -> str:
    """A folder like CUDA's, with a `ptxas` that tells its version."""
    program = folder / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nprintf '{ANSWER.format(version=version)}'\n", encoding="utf-8")
    program.chmod(0o755)
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No assembler, and the runtime of the newest packages for CUDA 12."""
    ptxas_version.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("jax._src.lib.cuda_path", None)
    monkeypatch.setattr(assembler, "SYSTEM", str(tmp_path / "empty"))
    monkeypatch.setattr(assembler, "nvjitlink_version", lambda: None)
    monkeypatch.setattr(assembler, "cuda_runtime", lambda: 12090)


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        ("12.6.85", False),
        ("12.8.61", True),
        ("12.8.93", True),
        ("12.9.41", True),
        ("12.9.86", False),
        ("13.0.88", False),
    ],
)
def test_the_version_of_ptxas_decides(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jax._src.lib.cuda_path", toolkit(tmp_path / "cuda", version))
    reason = refusal_of_assembler()
    assert (reason is not None) == is_refused
    assert reason is None or (f"ptxas {version} miscompiles" in reason and "cuda13" in reason)


@pytest.mark.parametrize(
    ("runtime", "is_refused"),
    [(0, False), (12060, False), (12080, True), (12090, True), (13000, False)],
)
def test_without_an_assembler_the_runtime_decides(
    runtime: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "cuda_runtime", lambda: runtime)
    assert (refusal_of_assembler() is not None) == is_refused


def test_the_package_of_nvjitlink_is_asked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jax._src.lib.cuda_path", toolkit(tmp_path / "cuda", "12.9.86"))
    monkeypatch.setattr(assembler, "nvjitlink_version", lambda: (12, 8, 93))
    assert "nvJitLink 12.8.93" in str(refusal_of_assembler())
    monkeypatch.setattr(assembler, "nvjitlink_version", lambda: (12, 9, 86))
    assert refusal_of_assembler() is None


def test_where_ptxas_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_ptxas() is None
    system = toolkit(tmp_path / "system", "12.9.86")
    monkeypatch.setattr(assembler, "SYSTEM", system)
    assert find_ptxas() == f"{system}/bin/ptxas"
    monkeypatch.setenv("PATH", toolkit(tmp_path / "path", "12.9.86") + "/bin")
    # JAX's path without an assembler in its package
    monkeypatch.setattr("jax._src.lib.cuda_path", "None")
    assert find_ptxas() == f"{tmp_path}/path/bin/ptxas"
    monkeypatch.setattr("jax._src.lib.cuda_path", toolkit(tmp_path / "jax", "12.9.86"))
    assert find_ptxas() == f"{tmp_path}/jax/bin/ptxas"


def test_an_assembler_that_tells_nothing_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = toolkit(tmp_path / "cuda", "12.9.86")
    (tmp_path / "cuda" / "bin" / "ptxas").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    monkeypatch.setattr("jax._src.lib.cuda_path", folder)
    assert ptxas_version() is None
    assert refusal_of_assembler() is not None, "the runtime decides"
