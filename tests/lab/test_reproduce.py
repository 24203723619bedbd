"""Rows and verdicts of a reproduction, and the exit status if one changes."""

import json
import re
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.paper import held_out
from lab.paper.effort import Effort
from lab.paper.fits import Fit
from lab.reproduce import blocks, command, fig9, overlay, table1
from lab.reproduce.rows import Row, changed, read_expected


def test_verdicts() -> None:
    within = Row("a", "a value", 1.04, 1.0, error=0.04, limit=0.05)
    assert (
        within.verdict == "PASS"
        and Row("a", "a value", 1.1, 1.0, error=0.1, limit=0.05).verdict == "FAIL"
    )
    assert Row("a", "a sentence", 1.0, "more", holds=False).verdict == "FAIL"
    assert Row("a", "a sentence", 1.0, "more", holds=True).verdict == "PASS"
    assert Row("a", "a value", 1.1, 1.0, error=0.6).verdict == "SHOWN", "no limit was stated"
    assert Row("a", "a value", 1.1, 1.0).verdict == "SHOWN"
    assert Row("a", "a value", 1.1, 1.0, error=0.1, limit=0.05, is_input=True).verdict == "INPUT"
    assert changed([within], "quick", {"quick": {"a": "PASS"}}) == []
    assert changed([within], "quick", {"quick": {"a": "FAIL"}}) == ["a: PASS, expected FAIL"], (
        "better is a change too"
    )
    assert changed([within], "quick", {}) == ["a: PASS, expected nothing"]


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1)])
def test_the_exit_status(
    verdict: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("fig8.a", "a sentence", 1.0, "more", holds=True)
    monkeypatch.setattr(command, "FIGURES", {"fig8": lambda effort: ({}, [row])})
    monkeypatch.setattr(command, "read_expected", lambda: {"quick": {"fig8.a": verdict}})
    assert main(["reproduce", "fig8", "--quick", "--processes", "1"]) == status
    assert "a sentence" in capsys.readouterr().out


def test_rows_are_printed_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first model's rows come before the second one is computed."""
    seen: list[str] = []

    def steps(
        effort: Effort, models: tuple[str, ...]
    ) -> Generator[list[Row], None, dict[str, object]]:
        for model in models:
            seen.append(capsys.readouterr().out)
            yield [Row(f"fig10.{model}", f"a value of {model}", 1.0, 1.0, error=0.0, limit=0.1)]
        return {"curves": {}}

    monkeypatch.setattr(command.fig10, "reproduce", steps)
    expected = {"fig10.101B": "PASS", "fig10.175B": "PASS"}
    monkeypatch.setattr(command, "read_expected", lambda: {"quick": expected})
    assert main(["reproduce", "fig10", "--quick", "--models", "101B", "175B"]) == 0
    assert "a value of 101B" in seen[1] and "a value of 175B" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["quick", "full"])
def test_figure_9_equals_the_recorded_digits(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick"] * (form == "quick")
    assert main(["reproduce", "fig9", *flags, "--exact", "--processes", "1"]) == 0, (
        capsys.readouterr().out
    )


def test_a_digit_that_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rows = fig9.reproduce(Effort(20))
    other = [replace(rows[0], ours=rows[0].ours + 1e-4), *rows[1:]]
    monkeypatch.setattr(command, "FIGURES", {"fig9": lambda effort: ({}, other)})
    assert main(["reproduce", "fig9", "--quick"]) == 0, "the verdicts are the same"
    assert main(["reproduce", "fig9", "--quick", "--exact"]) == 1
    assert rows[0].name in capsys.readouterr().out


@pytest.mark.slow
def test_the_planner_picks_the_splits_of_table_1() -> None:
    _, rows = table1.reproduce(Effort(20))
    assert [row.verdict for row in rows] == ["PASS"] * 4


@pytest.mark.parametrize("form", ["quick", "full"])
def test_every_recorded_verdict_is_expected_and_every_claim_has_a_row(form: str) -> None:
    rows = list(blocks.recorded(form))
    assert {row["name"]: row["verdict"] for row in rows} == read_expected()[form]
    assert {row["claim"] for row in rows} - {""} == {f"C{number}" for number in range(1, 10)}


def test_the_page_has_every_figure(tmp_path: Path) -> None:
    figures = {name: overlay.read(name) for name in ("fig8", "fig9", "fig10", "fig11")}
    overlay.draw(figures, str(tmp_path / "page.svg"))
    texts = [
        re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
        for path in (tmp_path / "page.svg", overlay.FILE)
    ]
    assert texts[0] == texts[1], "run python -m lab overlay"
    assert {"Figure 10, 175B: held out", "Figure 10, 175B: unfitted", "the paper, read off"} <= set(
        texts[0]
    )


def test_a_fit_is_searched_by_the_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The training error of a bowl around (0.53, 0.41)."""

    def bowl(fit: Fit, effort: Effort) -> float:
        memory, compute = fit.efficiencies["101B"]
        return (memory - 0.53) ** 2 + (compute - 0.41) ** 2

    monkeypatch.setattr(held_out, "training_error", bowl)
    monkeypatch.setattr(held_out, "RESULT", tmp_path / "held-out.json")
    assert main(["fit"]) == 0
    found = json.loads((tmp_path / "held-out.json").read_text())
    assert (found["memory"], found["compute"]) == (0.53, 0.41)
