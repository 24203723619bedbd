"""The commands `simulate` and `check-policy`, and answers to why a request was not chosen."""

import csv
import json
import os
from pathlib import Path

import pytest

from orca_jax.cli.main import main
from orca_jax.timeline.read import load_timeline
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from orca_jax.tools.simulate.why import why

TURNS = "tests.policy.turns:Turns"
LOAD = ["--num-requests", "5", "--max-num-seqs", "2", "--jobs", "1"]


def test_a_sweep_has_a_line_for_each_run_and_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.csv"
    words = [
        "simulate",
        "orca",
        TURNS,
        "--rate",
        "2",
        "4",
        "--cost",
        "0.5",
        "--csv",
        str(path),
        *LOAD,
    ]
    assert main(words) == 0
    table, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    runs = json.loads(line)["runs"]
    assert [(run["policy"].split()[0], run["rate"]) for run in runs] == [
        ("orca", 2), ("orca", 4), ("Turns", 2), ("Turns", 4)
    ]  # fmt: skip
    assert len(table.splitlines()) == 5
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 20 and float(rows[0]["first_token"]) == float(rows[0]["arrival"]) + 0.5


def test_processes_give_the_same_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for jobs in ("1", "2"):
        assert main(["simulate", "orca", "chunked", *LOAD, "--jobs", jobs]) == 0
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1]


def test_a_timeline_is_a_file_and_a_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    assert main(["simulate", "orca", "--timeline", str(path), "--cost", "0.25,0.125", *LOAD]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert len(load_timeline(str(path)).iterations) == first["iterations"]
    assert main(["simulate", "orca", "--cost", str(path), *LOAD]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert again["wall_s"] == pytest.approx(first["wall_s"])
    assert main(["timeline", str(path), "--html", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([TURNS, "orca", "--why", "1@2"], "why is for one run"),
        ([TURNS, "--why", "1"], "why must be REQUEST@ITERATION"),
        ([TURNS, "--why", "9@0"], "why must be from 0@0 to 4@"),
        ([TURNS, "--cost", "0"], "cost must be one to three seconds"),
        (["chunkd"], "did you mean chunked"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words, *LOAD]) == 2
    assert message in capsys.readouterr().err


def test_the_reason_of_each_absence_is_named() -> None:
    load = [
        SimulatedRequest(0.0, 10, 3),
        SimulatedRequest(0.0, 10, 3),
        SimulatedRequest(0.0, 4, 3),
        SimulatedRequest(9.0, 4, 1),
    ]
    cost = LinearCost(1.0, 0.0, 0.0)

    def said(request: int, iteration: int, policy: str = "chunked", **settings: object) -> str:
        sizes = {
            "max_num_seqs": 2,
            "max_num_batched_tokens": 12,
            "page_size": 4,
            "overlap": False,
            **settings,
        }
        return why(simulate(policy, load, cost, **sizes), request, iteration).partition(": ")[2]

    assert said(0, 0) == "it is chosen, with 10 tokens"
    assert said(2, 0) == (
        "it waits; all 2 places are taken and the budget of 12 tokens is spent and no row is free; chosen: 0, 1"
    )
    assert said(3, 0) == "it has not arrived, or has ended"
    assert said(0, 5) == "it has not arrived, or has ended"
    assert said(2, 0, max_num_seqs=3, max_num_batched_tokens=40, num_pages=6) == (
        "it waits; it needs 1 pages and 0 are free; chosen: 0, 1"
    )
    assert said(0, 1, TURNS, max_num_rows=3).startswith("it is paused; all 2 places are taken")
    assert said(1, 1, "orca", max_num_seqs=3, n_slots=13, max_num_batched_tokens=None).startswith(
        "it waits; "
    )


@pytest.mark.parametrize("name", ["Sound", "OverBudget"])
def test_a_check_ends_with_a_line_and_a_status(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            "check-policy",
            f"tests.simulate.broken:{name}",
            "--cases",
            "3" if name == "Sound" else "40",
        ]
    )
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1
    assert (status, shown[0][:20]) == (
        (0, "Sound: no fault in 3") if name == "Sound" else (1, shown[0][:20])
    )
    assert name == "Sound" or shown[0].startswith("OverBudget: 5 tokens in one iteration")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Exits", "Exits: decide raised SystemExit: 0 at line 14; smallest case: "),
        ("EndsTheProcess", "EndsTheProcess: it ended the process with status 0 in the case "),
        ("Sleeps", " did not end within 3 s"),
        ("LoopsWithoutTheSignal", " did not end within 3 s"),
    ],
)
def test_a_policy_cannot_end_its_check(
    name: str,
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A child process begins anew, so the limit is set where it is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import orca_jax.tools.simulate.guarded as it\nit.WALL_SECONDS = 3.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    status = main(["check-policy", f"tests.simulate.ending:{name}", "--cases", "3"])
    shown = capsys.readouterr().out.splitlines()
    assert status == 1 and len(shown) == 1 and fault in shown[0]


@pytest.mark.parametrize("number", ["0", "-1", "1000000000000"])
def test_the_number_of_cases_has_limits(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-policy", "tests.simulate.broken:Sound", "--cases", number]) == 2
    assert "cases must be from 1 to 100000" in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_of_a_model_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check-policy",
        "tests.simulate.ending:OnAModel",
        "--cases",
        "1",
        "--model",
        "preset:gpt2-tiny",
    ]
    assert main(words) == 0, capsys.readouterr()


DEEP = '{"a":' * 1000 + "1" + "}" * 1000
DEEPEST = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, DEEPEST])
@pytest.mark.parametrize(
    ("flag", "command"),
    [
        ("--speculative-config", ["serve", "preset:toy", "--port", "0"]),
        ("--scheduler-options", ["simulate", "tests.simulate.broken:Sound"]),
        ("--allowed-origins", ["serve", "preset:toy", "--port", "0"]),
    ],
)
def test_json_of_a_flag_that_is_nested_deeply_is_refused_by_its_flag(
    flag: str, command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, flag, text]) == 2
    shown = capsys.readouterr().err
    name = flag.removeprefix("--").replace("-", "_")
    assert (
        shown.startswith((f"error: {flag}: ", f"error: {name}"))
        and len(shown) < 400
        and "Traceback" not in shown
    )
