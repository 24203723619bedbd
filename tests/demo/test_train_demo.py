"""The demo's training: the rows of packed tokens, and a complete run in miniature."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.model.load import load_decoder
from tests.model.reference import mesh_of

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUESTION, ANSWER = "How many is 2 and 2?", "It is 2+2=<<2+2=4>>4.\n#### 4"


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    problems, text = tmp_path / "problems.jsonl", tmp_path / "text.txt"
    problems.write_text("\n".join(json.dumps({"question": QUESTION, "answer": ANSWER}) for _ in range(40)))
    text.write_text("“Well,” said she, ‘it’s late.’\n" * 300, encoding="utf-8")
    return problems, text


def test_rows(data: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from demo.data import END, Packer, mark_id, read_corpus, split_texts, train_tokenizer

    corpus = read_corpus(data)
    assert corpus.problems[0] == (QUESTION, "It is 2+2=4.\n#### 4")
    assert corpus.texts[0].startswith("\"Well,\" said she, 'it's late.'\n")
    heads, tails = split_texts(corpus)
    assert heads[0] + tails[0] == corpus.texts[0] and len(tails[0]) < 0.03 * len(heads[0])

    tokenizer = train_tokenizer(corpus, 300)
    packer = Packer(tokenizer, heads, corpus.problems, max_positions=256, seed=0)
    batch = packer.draw(rows=4, length=128, problem_rows=2)
    for row in range(4):
        for segment in range(1, batch.segments[row].max() + 1):
            (places,) = np.nonzero(batch.segments[row] == segment)
            assert (np.diff(batch.positions[row, places]) == 1).all() and batch.positions[row].max() < 256
            assert (batch.ids[row, places][1:] == batch.targets[row, places][:-1]).all()
            if row < 2:
                shown = tokenizer.decode(batch.ids[row, places].tolist(), skip_special_tokens=False)
                assert shown == f"<|user|>{QUESTION}<|assistant|>It is 2+2=4.\n#### 4"
                assert batch.targets[row, places][-1] == mark_id(tokenizer, END)
                answered = batch.targets[row, places][batch.answers[row, places] == 1].tolist()
                assert tokenizer.decode(answered, skip_special_tokens=False) == f"It is 2+2=4.\n#### 4{END}"
    assert (batch.segments[:2].max(axis=1) > 1).all(), "several problems fit in a row"
    assert ((batch.weights == 1) == (batch.segments > 0)).all()
    assert batch.answers[2:].sum() == 0


@pytest.mark.slow
def test_a_run_ends_resumes_and_is_bundled(data: tuple[Path, Path], tmp_path: Path) -> None:
    shape = ["--layers=1", "--embed=16", "--heads=2", "--vocab=300", "--batch-tokens=256", "--eval-minutes=0.01"]
    out, state = tmp_path / "out", tmp_path / "run"
    command = [sys.executable, str(SCRIPTS / "train_demo.py"), "--data", *map(str, data), "--eval-data", str(data[0])]
    command += ["--out", str(out), "--run-dir", str(state), *shape]

    def run(*more: str) -> dict[str, Any]:
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        state_file = state / "state" / "run.json"
        saved: dict[str, Any] = json.loads(state_file.read_text())
        return saved

    first = run("--minutes=0.001")
    assert (first["step"], len(first["history"])) == (1, 1)
    # A resumed run continues its clock, compilation included.
    second = run("--resume", f"--minutes={first['seconds'] / 60 + 0.1}")
    assert second["step"] > 1 and second["seconds"] >= first["seconds"] + 6
    losses = [record["answer_loss"] + record["text_loss"] for record in second["history"]]
    assert losses[-1] < losses[0] == first["history"][0]["answer_loss"] + first["history"][0]["text_loss"]

    decoder = load_decoder(out, dtype="float32", mesh=mesh_of(2))
    assert decoder.config.eos_token_ids == (0,) and decoder.config.max_positions == 1024
    card = (out / "README.md").read_text()
    assert "problems.jsonl" in card and str(tmp_path) not in card and "<|assistant|>" in card
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<|assistant|>" in (out / "chat_template.jinja").read_text()
