"""The comparison of decisions with another server, on fakes."""

import argparse
import json
import re
import sys
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from lab.__main__ import main
from lab.decisions import beside, turns
from lab.decisions.page import tables
from lab.decisions.record import MEASURED
from lab.decisions.turns import OURS, THEIRS, Body, DecisionClient, compared
from lab.decisions.work import Spent
from lab.peers.environment import Environment
from lab.peers.registry import PEERS

# a server whose probabilities move by STEP from one call to the next
FAKE = """
import http.server, json, sys, time

STEP = float(sys.argv[1])
calls = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global calls
        calls += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        one = {"probabilities": {"the sea": calls * STEP, "a house": 0.5}}
        text = json.dumps({"answers": {key: one for key in body["questions"]}}).encode()
        self.send_response(400 if len(body["questions"]) > 64 else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
import threading
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
print("@peer " + json.dumps({"ready": {"url": url, "flags": []}}), flush=True)
sys.stdin.read()
"""
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    described = json.loads((beside._SHAPE / "config.json").read_text(encoding="utf-8"))
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**described, **SHAPE}), encoding="utf-8")
    return folder


def fakes(steps: tuple[float, float]) -> dict[str, list[str]]:
    """The commands of two fakes."""
    names = zip((OURS, THEIRS), steps, strict=True)
    return {name: [sys.executable, "-c", FAKE, f"{step}"] for name, step in names}


def test_a_refused_call_is_an_error(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "commands", lambda *_: fakes((0.0, 0.0)))
    monkeypatch.setattr(beside, "prepare_environment", lambda *_: Path(sys.executable))
    assert main(["decisions_beside", "--model", str(small_model), "--questions", "65"]) == 2
    assert re.search(r"http://127\.0\.0\.1:\d+ answered 400: ", capsys.readouterr().err)


@pytest.mark.parametrize(("steps", "status"), [((0.0, 0.01), 0), ((0.01, 0.0), 1)])
def test_a_comparison(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[float, float],
    status: int,
) -> None:
    monkeypatch.setattr(beside, "commands", lambda *_: fakes(steps))
    monkeypatch.setattr(beside, "prepare_environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(
        turns, "compared", lambda times: {**compared(times), "ratio": {"wall": 2.0, "cpu": 2.0}}
    )
    saved = tmp_path / "record.json"
    flags = ["--model", str(small_model), "--tokens", "20", "--questions", "3", "--rounds", "2"]
    flags += ["--company", "2", "--pause", "0", "--save", str(saved), "--note", "fake"]
    assert main(["decisions_beside", *flags]) == status
    found = json.loads(saved.read_text(encoding="utf-8"))["beside"]["shape, vLLM compiled"]
    assert min(one["cpu"] for one in found["seconds"].values()) > 0
    for name, step in zip((OURS, THEIRS), steps, strict=True):
        largest = {kind: each["largest"] for kind, each in found["changed"][name].items()}
        assert largest["again"] == pytest.approx(2 * step)
        assert largest["cached"] == pytest.approx(3 * step)
        questions = {each["questions"] for each in found["changed"][name].values()}
        assert questions == {3 if step else 0}
    assert found["apart"] == pytest.approx(0.02), "the first measured call is the second one"
    text = tables({"beside": {"qwen3": found}})
    assert "| qwen3 | 3 | 20 |" in text and "fake" in text


def test_ratios_are_those_of_each_round() -> None:
    times = {
        OURS: [Spent(1, 2), Spent(2, 2), Spent(1, 4)],
        THEIRS: [Spent(2, 2), Spent(2, 1), Spent(3, 2)],
    }
    found = compared(times)
    assert found["ratio"] == {"wall": 2, "cpu": 0.5}
    assert found["range"] == {"wall": [1, 3], "cpu": [0.5, 1]}
    assert found["seconds"] == {OURS: {"wall": 1, "cpu": 2}, THEIRS: {"wall": 2, "cpu": 2}}


def test_each_server_is_first_in_every_other_round() -> None:
    names = turns.turns(["a", "b"])
    assert [next(names) for _ in range(6)] == ["a", "b", "b", "a", "a", "b"]


def test_calls_in_company_are_under_way_together(small_model: Path, tmp_path: Path) -> None:
    model = beside.decision_model(str(small_model), tmp_path / "model")
    args = argparse.Namespace(tokens=30, questions=5, company=4)
    bodies = beside.bodies(args, model)
    together = Barrier(5, timeout=30)

    def post(body: Body) -> Any:
        together.wait()
        return {"answers": {"0": {"probabilities": {body["cache_salt"]: len(body["questions"])}}}}

    company = bodies.company()
    salts = {bodies.call()["cache_salt"], *[each["cache_salt"] for each in company]}
    assert len(salts) == 5, "no call finds the state of another one"
    found = DecisionClient(post, lambda: 0.0).in_company(bodies.call("mine"), company)
    assert found == {"0": {"mine": 5}}


def test_both_servers_have_the_same_settings(tmp_path: Path) -> None:
    args = argparse.Namespace(dtype="bfloat16", questions=7, mode="eager")
    there = Environment(THEIRS, PEERS[THEIRS], tmp_path, tmp_path / "bin" / "python")
    found = beside.commands(args, tmp_path / "model", there)
    shared = ["--dtype", "bfloat16", "--max-num-seqs", "7", "--enable-prefix-caching"]
    for words in found.values():
        assert {*shared, str(tmp_path / "model")} <= {*words}
    assert found[THEIRS][-2:] == ["--mode", "eager"]


def test_the_recorded_probabilities_are_ours_in_any_company() -> None:
    record = json.loads(MEASURED.read_text(encoding="utf-8"))["beside"]
    for one in record.values():
        assert one["ratio"]["wall"] >= 1 and one["questions"] == 64
        for kind in one["changed"][OURS].values():
            assert kind == {"largest": 0, "questions": 0}
        assert one["changed"][THEIRS]["company"]["questions"] > 0
