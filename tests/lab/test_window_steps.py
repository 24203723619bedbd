"""The command for windows runs and counts every context."""

import json

import pytest

from lab.__main__ import main


@pytest.mark.slow
def test_a_step_after_each_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["windows", "--backends", "xla", "--contexts", "1500", "3000", "--steps", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["rows"]["xla"]) == ["1500", "3000"] and min(found["rows"]["xla"].values()) > 0
