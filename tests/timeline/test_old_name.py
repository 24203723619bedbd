"""The old name of the timeline's commands."""

import json
from pathlib import Path

import pytest

from orca_jax.trace import main
from tests.timeline.traced import TracedLab


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lab = TracedLab(max_bs=2)
    lab.add("A", 3, 4)
    lab.run()
    lab.writer.flush()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lab.parts))
    return path


@pytest.mark.parametrize(
    ("words", "new"),
    [
        ((), "python -m orca_jax.trace is now python -m orca_jax.timeline\n"),
        (("replay",), "python -m orca_jax.trace replay is now python -m orca_jax.bench replay\n"),
    ],
)
def test_the_old_name_works_and_names_the_new_one(
    words: tuple[str, ...], new: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(file)]) == 0
    shown = capsys.readouterr()
    assert shown.err == new
    last = json.loads(shown.out.splitlines()[-1])
    assert last.get("recorded", last)["requests"] == 1
