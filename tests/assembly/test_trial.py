"""The trial of the library against XLA, and its result on disk."""

import json
from pathlib import Path

import pytest

from orca_jax.assembly import trial
from orca_jax.assembly.trial import ROWS, is_faster
from tests.kernels.native.machine import library_of

WIDTH, NAME = 8, "native"
RATIOS = {"float32": [2.0, 0.6], "bfloat16": [2.0, 0.4]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_products_are_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = library_of()
    for name, size in {
        "_INPUTS": 64,
        "_OUTPUTS": 2 * library.width,
        "_MATRICES": 2,
        "_REPEATS": 2,
    }.items():
        monkeypatch.setattr(trial, name, size)
    ratios = trial.measured.__wrapped__(library.width, dtype)  # not kept for this process
    assert len(ratios) == len(ROWS) and all(ratio > 0 for ratio in ratios)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of all trials; each one finds the numbers of its type."""
    made: list[str] = []

    def measured(width: int, dtype: str) -> list[float]:
        made.append(dtype)
        return RATIOS[dtype]

    monkeypatch.setattr(trial, "measured", measured)
    return made


def test_the_result_is_kept(trials: list[str], tmp_path: Path) -> None:
    width, name, folder = WIDTH, NAME, str(tmp_path)
    for _ in range(2):
        assert is_faster(width, "float32", folder, name) and not is_faster(
            width, "bfloat16", folder, name
        )
    assert trials == ["float32", "bfloat16"]
    file = tmp_path / f"{name}-float32.json"
    assert json.loads(file.read_text(encoding="utf-8")) == {"8": 2.0, "256": 0.6}
    assert is_faster(width, "float32", folder, "other")
    assert trials[2:] == ["float32"], "another library or processor"


def test_a_kept_result_decides_as_before(
    trials: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after rounding: another form of products has other bits."""
    monkeypatch.setitem(RATIOS, "float32", [0.99996, 1.0])
    assert [is_faster(WIDTH, "float32", str(tmp_path), NAME) for _ in range(2)] == [False, False]
    assert trials == ["float32"]


@pytest.mark.parametrize("text", ["", "[]", '{"8": 1}', '{"8": [], "256": 1}', "\xff"])
def test_a_damaged_result_is_measured_again(trials: list[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / f"{NAME}-bfloat16.json"
    file.write_bytes(text.encode("latin-1"))
    assert not is_faster(WIDTH, "bfloat16", str(tmp_path), NAME)
    assert not is_faster(WIDTH, "bfloat16", str(tmp_path), NAME)
    assert trials == ["bfloat16"] and len(json.loads(file.read_text(encoding="utf-8"))) == 2


def test_a_result_that_cannot_be_kept_is_measured_at_each_start(
    trials: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for directory in (None, str(tmp_path / "file" / "folder")):
        assert is_faster(WIDTH, "float32", directory, NAME)
    assert trials == ["float32"] * 2
