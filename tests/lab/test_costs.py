"""The host's time of schedulers, the parts of the device's time, and the commands of an installation."""

import json
import sys

import pytest

from lab import install
from lab.__main__ import main
from orca_jax.values.errors import OrcaError


def test_the_time_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Eleven pairs, on a simulated device: all members of all iterations are counted."""
    assert main(["scheduler_cost", "--num-requests", "10"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["host_time"]
    assert len(found) == 11 and all(row["us"] > 0 for row in found.values())
    assert found["orca"]["request_iterations"] == found["orca, two in flight"]["request_iterations"]
    assert found["request_level"]["request_iterations"] > found["orca"]["request_iterations"]


def test_parts_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parts", "--model", "preset:toy", "--num-requests", "2"]) == 2
    assert "no device to profile" in capsys.readouterr().err


def test_a_failed_command_shows_its_last_line() -> None:
    with pytest.raises(OrcaError, match="ended with code 3: no network"):
        install._timed(
            [sys.executable, "-c", "import sys; print('no network', file=sys.stderr); sys.exit(3)"]
        )
    assert install._timed([sys.executable, "-c", ""]) > 0
