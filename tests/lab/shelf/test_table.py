"""The table of all policies on equal loads: its figures by hand, and the command in a short form."""

from pathlib import Path

import pytest

from lab.__main__ import main
from lab.shelf import command, table
from lab.shelf.loads import agents, load
from lab.shelf.virtual import Call, Outcome, Service


def test_figures() -> None:
    """Two requests from A and B. A's tokens come after 1 and 3 s; B's after 2 s, as late as they may for the reader."""
    calls = [Call(0.0, 5, 2, tenant="A"), Call(1.0, 5, 1, tenant="B")]
    services = [Service(0.0, [1.0, 3.0]), Service(1.0, [3.0])]
    found = table.figures_of(calls, Outcome(services, 1, 13 // 2, 0, []))
    assert (
        found["requests_per_s"] == 2 / 3
        and found["p50_ttft_ms"] == 1000
        and found["p99_ttft_ms"] == 2000
    )
    assert found["p99_gap_ms"] == 2000 and found["p50_normalized_ms"] == 1500
    assert found["jain"] == pytest.approx(3.5**2 / (2 * (1.5**2 + 2**2)))
    assert found["qoe"] == pytest.approx((0.5 + 0) / 2)
    assert found["evictions"] == 1 and found["again"] == pytest.approx(100 * 6 / 13)


def test_shown() -> None:
    assert table.shown([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert table.shown([1234.5, 1234.5]) == "1,234" and table.shown([0.0]) == "0"


def test_calls_of_a_program_follow_each_other() -> None:
    calls = agents(2.0, 60, 0)
    assert len(calls) == 60 and [call.after for call in calls].count(None) > 5
    for index, call in enumerate(calls):
        if call.after is not None:
            assert call.after == index - 1 and calls[index - 1].tenant == call.tenant
            assert call.num_prompt > calls[index - 1].num_prompt


def test_equal_loads_but_for_the_time() -> None:
    slow, fast = (load("orca", rate, 20, 0) for rate in (1.0, 4.0))
    assert [call._replace(arrival=0.0) for call in slow] == [
        call._replace(arrival=0.0) for call in fast
    ]
    assert [call.arrival for call in slow] == pytest.approx([4 * call.arrival for call in fast])


def test_the_command_leaves_out_loads_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "LOADS", (0.9,))
    monkeypatch.setattr(table, "SEEDS", (0,))
    monkeypatch.setattr(command, "RESULT", tmp_path / "shelf.json")
    monkeypatch.setattr(command, "PICTURE", tmp_path / "shelf.svg")
    flags = ["--traces", str(tmp_path), "--num-requests", "12", "--processes", "1", "--record"]
    assert main(["shelf", *flags]) == 0
    shown = capsys.readouterr().out
    assert "left out, since --traces has no file of them: azure, mooncake" in shown
    assert (
        all(shown.count(name) >= 2 for name in table.POLICIES)
        and (tmp_path / "shelf.svg").is_file()
    )
    assert main(["shelf", "--num-requests", "2"]) == 2
    assert "num_requests must be at least 10" in capsys.readouterr().err


def test_own_policies_beside_those_of_the_shelf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "LOADS", (0.9,))
    monkeypatch.setattr(table, "SEEDS", (0,))
    own = tmp_path / "own.py"
    own.write_text("from lab.policies.sarathi import Sarathi\n\n\nclass Own(Sarathi):\n    pass\n")
    flags = [
        "shelf",
        "--num-requests",
        "12",
        "--processes",
        "1",
        "--policy",
        "sarathi",
        f"{own}:Own",
    ]
    assert main(flags) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: line[1:] for line in lines if line and line[0] in ("sarathi", f"{own}:Own")}
    assert len(found) == 2 and found["sarathi"] == found[f"{own}:Own"]
    for wrong, message in (
        (["--policy", "fifo"], "policy must be FILE.py:CLASS or one of orca"),
        (["--record"], "leave"),
    ):
        assert main([*flags, *wrong]) == 2
        assert message in capsys.readouterr().err
