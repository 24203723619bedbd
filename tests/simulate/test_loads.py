"""Loads of `simulate`: recorded times, what schedulers read, and values that cannot be simulated."""

import csv
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from orca_jax.cli.main import main
from orca_jax.flags.program import run_program
from orca_jax.policy import API, Decision, PolicyView, RequestView
from orca_jax.timeline.read import load_timeline
from orca_jax.tools.bench.workload.files import read_azure, read_mooncake
from orca_jax.tools.simulate import processes
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import Urgency

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens,deadline,tenant,priority,program,weight,ttft,tpot
2023-11-16 18:17:03.0000000,40,3,1.5,a,2,x,3,0.5,0.1
2023-11-16 18:17:05.5000000,40,3,,,,,,,
"""
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 40, "output_length": 3, "hash_ids": [1], "deadline": 1, "tenant": "a"}\n'
    '{"timestamp": 3500, "input_length": 40, "output_length": 3, "hash_ids": [2], "priority": -1}\n'
)
SHORT = ["--num-requests", "2", "--jobs", "1", "--cost", "0.5"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The first run of a simulation."""
    assert main(["simulate", *words]) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    return run


@pytest.mark.parametrize(("trace", "text"), [("azure", AZURE), ("mooncake", MOONCAKE)])
@pytest.mark.parametrize(
    ("rate", "arrivals", "times"),
    [([], "as recorded", 2.5), (["0.5"], "0.5", 2.0), (["inf"], "at once", 0.0)],
)
def test_a_trace_keeps_its_times_unless_a_rate_is_given(
    trace: str, text: str, rate: list[str], arrivals: str, times: float, tmp_path: Path, capsys: Any
) -> None:
    (path := tmp_path / "load").write_text(text)
    words = [
        "chunked",
        "--trace",
        trace,
        "--trace-data",
        str(path),
        "--csv",
        str(tmp_path / "out.csv"),
        *SHORT,
    ]
    run = simulated(capsys, *words, *(["--rate", *rate] if rate else []))
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [float(row["arrival"]) for row in rows] == pytest.approx([0.0, times])
    assert run["arrivals"] == arrivals and run["rate"] == (0.5 if arrivals == "0.5" else None)


def test_files_have_what_schedulers_read(tmp_path: Path) -> None:
    (tmp_path / "azure").write_text(AZURE)
    (tmp_path / "mooncake").write_text(MOONCAKE)
    first, second = read_azure(str(tmp_path / "azure"), None, 1.0)
    assert first.urgency == Urgency(2, "a", 1.5, "x", 3.0, 0.5, 0.1) and second.urgency == Urgency()
    first, second = read_mooncake(str(tmp_path / "mooncake"), None, 1.0)
    assert first.urgency == Urgency(tenant="a", deadline=1.0) and second.urgency == Urgency(-1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('"deadline": -1', "line 1: deadline must"),
        ('"deadline": "soon"', "line 1: could not convert"),
        ('"priority": 1.5', "line 1: priority must be a number, got 1.5"),
        ('"tenant": 7', "line 1: tenant must be a text, got 7"),
        ('"deadline": NaN', "line 1: deadline must"),
        ('"weight": [1]', r"line 1: weight must be a number, got \[1\]"),
        ('"x": ' + "[" * 100_000, "line 1: it is nested deeper than 64 levels"),
        ('"output_length": 1e12', "line 1: a length must be at most 10000000 tokens"),
        ('"output_length": Infinity', "line 1: cannot convert float infinity"),
        ('"timestamp": NaN', "line 1: timestamp must be a number"),
    ],
)
def test_a_line_that_cannot_be_simulated_is_named(line: str, reason: str, tmp_path: Path) -> None:
    start = '{"timestamp": 1000, "input_length": 40, "output_length": 3, "hash_ids": [1], '
    (path := tmp_path / "load").write_text(f"{start}{line}}}\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_mooncake(str(path), None, 1.0)
    assert caught.value.param == "trace_data"


class Spy:
    """Chooses the first job, and keeps what it has seen of all."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"deadline", "tenant", "priority", "program"})
    may_starve: ClassVar[bool] = True
    seen: ClassVar[dict[int, tuple[Any, ...]]] = {}

    def decide(self, view: PolicyView) -> Decision:
        jobs = [job for job in [*view.residents, *view.waiting] if job.num_left]
        self.seen.update(
            {job.index: (job.priority, job.tenant, job.deadline, job.program) for job in jobs}
        )
        return Decision([(job, min(job.num_left, view.token_budget)) for job in jobs[:1]])

    def started(self, job: RequestView, num_tokens: int) -> None:
        pass

    def ended(self, job: RequestView) -> None:
        pass


def test_flags_give_what_schedulers_read(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spy, "seen", {})
    (path := tmp_path / "load").write_text(AZURE)
    words = [f"{__name__}:Spy", "--trace", "azure", "--trace-data", str(path), *SHORT]
    words += ["--deadline", "0.25", "--tenant", "b", "--priority", "7", "--program", "y"]
    run = simulated(capsys, *words, "--csv", str(tmp_path / "out.csv"))
    assert Spy.seen == {0: (2, "a", 1.5, "x"), 1: (7, "b", 0.25, "y")}, (
        "those of the file count more"
    )
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["tenant"], row["program"], row["priority"], row["deadline"]) for row in rows] == [
        ("a", "x", "2", "1.5"), ("b", "y", "7", "0.25")
    ]  # fmt: skip
    assert run["late_requests"] == 1


def test_each_request_draws_one_of_the_values(tmp_path: Path, capsys: Any) -> None:
    words = [
        "chunked",
        "--num-requests",
        "40",
        "--cost",
        "0.5",
        "--scheduling-policy",
        "fair",
        "--max-num-seqs",
        "2",
    ]
    path = tmp_path / "out.csv"
    ends = []
    for tenants in (["a"], ["a", "b"]):
        simulated(capsys, *words, "--tenant", *tenants, "--csv", str(path))
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert {row["tenant"] for row in rows} == set(tenants)
        ends.append([row["end"] for row in rows])
    assert ends[0] != ends[1], "the order by tenants differs"


def test_the_order_of_deadlines_differs_from_that_of_arrival(capsys: Any) -> None:
    words = [
        "chunked",
        "--num-requests",
        "40",
        "--cost",
        "0.5",
        "--max-num-seqs",
        "2",
        "--deadline",
        "400",
        "9000",
    ]
    late = {
        policy: simulated(capsys, *words, "--scheduling-policy", policy)["late_requests"]
        for policy in ("fcfs", "deadline")
    }
    assert late["deadline"] < late["fcfs"]


class PausesTheOldest(Spy):
    """Evicts the oldest resident before it has drawn a token, again and again."""

    def decide(self, view: PolicyView) -> Decision:
        return Decision([(job, 1) for job in view.waiting if job.num_left][:1], view.residents[:1])


def test_overruled_decisions_are_counted(
    tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    run = simulated(capsys, f"{__name__}:PausesTheOldest", *SHORT, "--timeline", str(path))
    assert run["overruled_decisions"] > 0
    timeline = load_timeline(str(path))
    assert (
        sum(iteration.overruled for iteration in timeline.iterations) == run["overruled_decisions"]
    )
    assert main(["simulate", f"{__name__}:PausesTheOldest", *SHORT]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert head.split()[-1] == "overruled" and row.split()[-1] == f"{run['overruled_decisions']}"


class Slow(Spy):
    def decide(self, view: PolicyView) -> Decision:
        time.sleep(0.02)
        return super().decide(view)


def test_decisions_take_no_time_in_virtual_runs(
    capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        simulated(capsys, f"{__name__}:Slow", "--num-requests", "1", "--jobs", "1", "--cost", "0.5")
    assert "a decision took" not in caplog.text


def test_two_timelines_are_shown_side_by_side(tmp_path: Path, capsys: Any) -> None:
    figures = []
    for name, policy in (("a", "orca"), ("b", "request_level")):
        words = [
            policy,
            "--num-requests",
            "9",
            "--max-num-seqs",
            "2",
            "--timeline",
            str(tmp_path / name),
        ]
        figures.append(simulated(capsys, *words))
    assert main(["timeline", str(tmp_path / "a"), "--beside", str(tmp_path / "b")]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    shown = json.loads(line)
    assert (
        shown["wall_s"] == figures[0]["wall_s"]
        and shown["beside"]["wall_s"] == figures[1]["wall_s"]
    )
    assert "orca" in table[0] and "request_level" in table[0]
    (row,) = [row.split() for row in table if row.startswith("  wall_s")]
    assert [float(value.replace(",", "")) for value in row[1:]] == [
        pytest.approx(each["wall_s"], rel=1e-3) for each in figures
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cost", "nan"], "cost must be one to three seconds"),
        (["--cost", "inf"], "cost must be one to three seconds"),
        (["--cost", "1,nan"], "cost must be one to three seconds"),
        (["--cost", "FIFO"], "cannot be read: not a regular file"),
        (["--cost", "/dev/zero"], "cannot be read: not a regular file"),
        (["--cost", "DEEP"], "is not a line of a timeline"),
        (["--num-requests", "1000000000000"], "num_requests must be from 1 to 1000000"),
        (["--num-pages", "1000000000000"], "num_pages must be at most 4194304"),
        (
            ["--max-num-seqs", "1000000000000", "--max-num-batched-tokens", "1000000000000"],
            "must be at most",
        ),
        (["--why", f"17@{'9' * 5000}"], "why must be REQUEST@ITERATION"),
        (["--jobs", "0", "--rate", "1", "2"], "jobs must be at least 1"),
        (["--rate", "nan"], "rate must be above 0"),
        (["--trace", "azure", "--trace-data", "FIFO"], "cannot be read: not a regular file"),
        (["--trace", "mooncake", "--trace-data", "LINK"], "cannot be read: not a regular file"),
        (["--trace", "mooncake", "--trace-data", "DEEP"], "nested deeper than 64 levels"),
        (
            ["--trace", "azure", "--trace-data", "DEEP", "--length-scale", "inf"],
            "is not a file of this trace",
        ),
        (["--csv", "FIFO"], "No such device or address"),
        (["--deadline", "nan"], "deadline"),
        (["--priority", str(10**30)], "priority"),
    ],
)
def test_values_that_cannot_be_simulated_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "FIFO")
    (tmp_path / "LINK").symlink_to("/dev/zero")
    (tmp_path / "DEEP").write_text("[" * 100_000 + "\n")
    words = [str(tmp_path / word) if word in ("FIFO", "LINK", "DEEP") else word for word in words]
    begun = time.process_time()
    assert main(["simulate", "chunked", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown) < 600 and shown.count("\n") == 1
    assert time.process_time() - begun < 5


def test_a_limit_of_threads_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(processes.ProcessPoolExecutor, "_start_executor_manager_thread", start)
    assert (
        main(["simulate", "chunked", "--rate", "1", "2", "--jobs", "2", "--num-requests", "2"]) == 2
    )
    assert "the system starts no more threads" in capsys.readouterr().err

    def serve(words: object) -> int:
        raise RuntimeError("can't start new thread")

    assert run_program("serve", serve, []) == 2
    assert (
        "raise the limit of processes (ulimit -u, or pids of the container)"
        in capsys.readouterr().err
    )
