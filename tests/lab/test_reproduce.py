"""Rows and verdicts of a reproduction, and the exit status if one changes."""

import pytest

from lab.__main__ import main
from lab.reproduce import command
from lab.reproduce.rows import Row, changed


def test_verdicts() -> None:
    within = Row("a", "a value", 1.04, 1.0, error=0.04, limit=0.05)
    assert within.verdict == "PASS" and Row("a", "a value", 1.1, 1.0, error=0.1, limit=0.05).verdict == "FAIL"
    assert Row("a", "a sentence", 1.0, "more", holds=False).verdict == "FAIL"
    assert Row("a", "a value", 1.1, 1.0, error=0.1, limit=0.05, is_input=True).verdict == "INPUT"
    assert changed([within], "quick", {"quick": {"a": "PASS"}}) == []
    assert changed([within], "quick", {"quick": {"a": "FAIL"}}) == ["a: PASS, expected FAIL"], "better is a change too"
    assert changed([within], "quick", {}) == ["a: PASS, expected nothing"]


@pytest.mark.parametrize(("verdict", "status"), [("PASS", 0), ("FAIL", 1)])
def test_the_exit_status(
    verdict: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FIGURES", {"fig8": lambda effort: ({}, [Row("fig8.a", "a sentence", 1.0, "more")])})
    monkeypatch.setattr(command, "read_expected", lambda: {"quick": {"fig8.a": verdict}})
    assert main(["reproduce", "fig8", "--quick", "--processes", "1"]) == status
    assert "a sentence" in capsys.readouterr().out
