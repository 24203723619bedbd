"""The demo's training: the rows of packed tokens, and a complete run in miniature."""

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.model.load import load_decoder
from tests.model.reference import mesh_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("“Well,” said she, ‘it’s late.’\n" * 300, encoding="utf-8")
    return path


def test_rows(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations and stories lie in segments of their own; of conversations only the answers are learnt."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from demo.data import (
        END,
        TEXT_WEIGHT,
        Packer,
        mark_id,
        read_texts,
        split_texts,
        train_tokenizer,
    )
    from demo.tasks.example import Example

    texts = read_texts([text])
    assert texts[0].startswith("\"Well,\" said she, 'it's late.'\n")
    heads, tails = split_texts(texts)
    assert heads[0] + tails[0] == texts[0] and len(tails[0]) < 0.03 * len(heads[0])

    pieces = [
        "12.",
        (Example("2 + 2?", "It is 4."), Example("And 1?", "It is 5.")),
        (Example("7" * 300, "Hi."),),
    ]
    tokenizer = train_tokenizer(texts, iter(pieces), 300)
    packer = Packer(tokenizer, heads, cycle(pieces), max_positions=200, seed=0)
    batch = packer.draw(rows=4, length=128, text_rows=2)
    shown = set()
    for row in range(4):
        for segment in range(1, batch.segments[row].max() + 1):
            (places,) = np.nonzero(batch.segments[row] == segment)
            assert (batch.positions[row, places] == np.arange(len(places))).all()
            assert (batch.ids[row, places][1:] == batch.targets[row, places][:-1]).all()
            weights = batch.weights[row, places]
            if row < 2:
                assert batch.targets[row, places][-1] == mark_id(tokenizer, END)
                learnt = batch.targets[row, places][weights == 1].tolist()
                shown.add(
                    tuple(
                        tokenizer.decode(ids, skip_special_tokens=False)
                        for ids in (batch.ids[row, places].tolist(), learnt)
                    )
                )
            else:
                assert (weights == TEXT_WEIGHT).all()
    conversation = "<|user|>2 + 2?<|assistant|>It is 4.<|end|><|user|>And 1?<|assistant|>It is 5."
    assert shown == {("12.", f"2.{END}"), (conversation, f"It is 4.{END}It is 5.{END}")}, (
        "the long one is dropped"
    )
    assert (batch.segments[:2].max(axis=1) > 1).all(), "several pieces fit in a row"
    assert (batch.weights[batch.segments == 0] == 0).all()


@pytest.mark.slow
def test_long_pieces_leave_room_for_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are too short for most pieces are filled all the same, and a long row takes the long ones."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from demo.data import Packer, train_tokenizer

    pieces = ["7" * 300, "7" * 300, "7" * 300, "12"]
    packer = Packer(
        train_tokenizer([], iter(pieces), 300), [], cycle(pieces), max_positions=1024, seed=0
    )
    for _ in range(30):
        assert (packer.draw(rows=4, length=64, text_rows=0).segments > 0).mean() > 0.9
    assert np.bincount(packer.draw(rows=1, length=1024, text_rows=0).segments[0]).max() == 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "none.txt"], "--data must name text files: none.txt is not a file"),
        (["--batch-tokens=1500"], "--batch-tokens must be a multiple of 1024"),
        (["--devices=3"], "--devices must divide the 4 rows of 1024 tokens"),
        (["--decay-from=1"], "--decay-from must be a share below 1"),
        (["--heads=3"], "--heads must divide --embed, 256"),
        (["--count=1"], "--count must be at least 2"),
        (["--resume", "--run-dir=none"], "--resume needs a saved state in none"),
    ],
)
def test_wrong_flags(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from train_demo import parse_arguments

    with pytest.raises(SystemExit) as exit_:
        parse_arguments(flags)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_command_of_the_card_has_all_changed_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from train_demo import command_line, parse_arguments

    assert command_line(parse_arguments([])) == "--minutes 60 --decay-from 0.3"
    flags = ["--tokens=2e6", "--devices=2", "--layers=2", "--seed=3", "--note=none"]
    assert (
        command_line(parse_arguments(flags))
        == "--tokens 2e+06 --decay-from 0.3 --devices 2 --layers 2 --seed 3"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_ends_resumes_and_is_bundled(text: Path, tmp_path: Path) -> None:
    shape = [
        "--layers=2",
        "--embed=16",
        "--heads=2",
        "--vocab=300",
        "--batch-tokens=2048",
        "--eval-minutes=0.01",
    ]
    out, state = tmp_path / "out", tmp_path / "run"
    command = [
        sys.executable,
        str(SCRIPTS / "train_demo.py"),
        "--data",
        str(text),
        "--devices=2",
        "--count=2",
    ]
    command += ["--out", str(out), "--run-dir", str(state), *shape]

    def run(*more: str) -> dict[str, Any]:
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        state_file = state / "state" / "run.json"
        saved: dict[str, Any] = json.loads(state_file.read_text())
        return saved

    first = run("--minutes=0.001")
    assert (first["step"], len(first["history"])) == (1, 1)
    # A resumed run continues its clock, compilation included.
    second = run("--resume", f"--minutes={first['seconds'] / 60 + 0.2}")
    assert second["step"] > 1 and second["seconds"] >= first["seconds"] + 12
    losses = [record["answer_loss"] for record in second["history"]]
    assert losses[-1] < losses[0] == first["history"][0]["answer_loss"]
    assert set(second["history"][0]["accuracy"]) >= {
        "word problems",
        "JSON extraction",
        "questions about the engine",
    }

    decoder = load_decoder(out, dtype="float32", mesh=mesh_of(2))
    assert decoder.config.eos_token_ids == (0,) and decoder.config.max_positions == 1024
    card = (out / "README.md").read_text()
    assert "text.txt" in card and str(tmp_path) not in card and "<|assistant|>" in card
    assert "| JSON extraction | 0.0 % | 2 |" in card and card.count("```text") == 20
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<|assistant|>" in (out / "chat_template.jinja").read_text()
