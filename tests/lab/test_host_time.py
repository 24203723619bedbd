"""The host's time on the toy engine: its parts add up, and wrong flags are refused."""

import json

import pytest

from lab.__main__ import main


def test_host_time_with_a_steady_batch(capsys: pytest.CaptureFixture[str]) -> None:
    main(["host", "--model", "preset:toy", "--running", "2", "4", "--passes", "1"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["running"] for row in line["rows"]] == [2, 4]
    for row in line["rows"]:
        assert row["mean_batch_size"] > 0.9 * row["running"]
        parts = row["schedule_ms"] + row["pack_ms"] + row["update_ms"]
        assert (
            row["host_ms_per_iteration"] == pytest.approx(parts)
            and 0 <= row["device_idle_share"] <= 1
        )
    for flags in (["--running", "0"], ["--passes", "0"]):
        assert main(["host", "--model", "preset:toy", *flags]) == 2
