"""Programs keep running if standard output or standard error fails."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from orca_jax.batch.__main__ import main as batch
from orca_jax.helpers import console
from orca_jax.helpers.console import (
    LastingStream,
    bar,
    lasting_output,
    line_without_bars,
    progress_bar,
)
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.tools.timeline.__main__ import main as timeline
from tests.covering import slow
from tests.serve.running import wait_until
from tests.timeline.traced import ONE, TracedLab


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lab = TracedLab(max_bs=1, shape=ONE)
    lab.add("A", 3, 4)
    lab.run()
    lab.writer.flush()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lab.parts))
    return path


@contextmanager
def full() -> Iterator[TextIO]:
    """A file on a full disk."""
    with open(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8") as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for the text in its buffer


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:
        yield stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


BROKEN = {"full": full, "closed pipe": closed_pipe}


def test_the_first_error_is_logged_and_the_rest_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with closed_pipe() as pipe, caplog.at_level(logging.INFO):
        stream = LastingStream(pipe, "the report", replaces_file=True)
        for _ in range(3):
            assert stream.write("text\n") == 5
            stream.flush()
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "the report cannot be written: Broken pipe; it is left out from now on"
    )
    assert record.levelno == logging.INFO and not stream.is_lost


def test_text_goes_through_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    with lasting_output() as output:
        print("report")
        print("progress", file=sys.stderr)
        assert not sys.stdout.isatty()
    assert capsys.readouterr() == ("report\n", "progress\n") and output.error is None


@pytest.mark.parametrize("broken", BROKEN)
def test_a_timeline_is_shown_to_a_broken_output(
    broken: str, trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader such as `head` may end early. A full disk loses the report, so it is an error."""
    with BROKEN[broken]() as stream, redirect_stdout(stream):
        status = timeline([str(trace)])
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    if broken == "full":
        assert status == 1 and "No space left on device" in warnings[0]
    else:
        assert status == 0 and not warnings


@pytest.mark.parametrize("broken", BROKEN)
def test_a_benchmark_runs_to_its_end_without_standard_output(broken: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = ["--model", "preset:toy", "--num-requests", "2", "--trace-file", str(trace)]
    with BROKEN[broken]() as stream, redirect_stdout(stream):
        assert bench(["offline", *flags]) == (1 if broken == "full" else 0)
    assert trace.stat().st_size


@pytest.mark.parametrize("broken", BROKEN)
def test_a_batch_answers_all_rows_without_standard_output(broken: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")
    with BROKEN[broken]() as stream, redirect_stdout(stream):
        assert (
            batch(["-i", str(source), "-o", str(output), "--model", "preset:toy", "--no-progress"])
            == 0
        )
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == [
        "line-1",
        "line-2",
    ]


def test_progress_bars_survive_a_closed_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in BROKEN.values():
        with kind() as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setattr(console, "has_terminal", lambda: True)
            show = progress_bar("Loading", enabled=True)
            show(1, 2)
            show(2, 2)
            with bar(total=1, desc="Generating", dynamic_ncols=True) as shown:
                shown.update()
            monkeypatch.undo()
            monkeypatch.setattr(sys, "stderr", stream)
            line_without_bars("loading")
    monkeypatch.setattr(sys, "stderr", None)
    line_without_bars("loading")
    assert bar(total=1).disable


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bars_are_for_terminals_and_lines_for_files(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    line_without_bars("loading and compiling demo")
    show = progress_bar("Loading", enabled=True)
    show(1, 2)
    show(2, 2)
    written = capsys.readouterr().err
    assert (written == "loading and compiling demo\n") != is_terminal
    assert ("Loading:" in written) == is_terminal


def run(*words: str, **files: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], text=True, timeout=60, check=False, **files
    )


def test_the_exit_of_the_interpreter_is_quiet(trace: Path) -> None:
    """The interpreter itself would report the rest of its buffer, and end with code 120."""
    with closed_pipe() as pipe:
        piped = run("orca_jax.tools.timeline", str(trace), stdout=pipe, stderr=subprocess.PIPE)
    assert (piped.returncode, piped.stderr) == (0, "")
    with full() as disk:
        lost = run("orca_jax.tools.timeline", str(trace), stdout=disk, stderr=subprocess.PIPE)
    assert lost.returncode == 1 and lost.stderr.startswith(
        "standard output cannot be written: No space left"
    )
    assert len(lost.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "case",
    [
        "full",
        *(slow(case) for case in ("closed pipes", "closed files")),
    ],
)
def test_a_server_serves_without_standard_output(case: str, tmp_path: Path) -> None:
    """With closed files the first sockets would be its standard files."""
    place = tmp_path / "server.sock"
    command = [sys.executable, "-m", "orca_jax.serve", "--model", "preset:toy", "--uds", str(place)]
    log = tmp_path / "log"
    if case == "closed files":
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    with full() as disk, closed_pipe() as pipe, log.open("w") as errors, ExitStack() as stack:
        out, err = (disk, errors) if case == "full" else (pipe, pipe)
        process = subprocess.Popen(command, stdout=out, stderr=err)
        stack.callback(process.wait)
        stack.callback(process.kill)
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(place)), base_url="http://localhost"
        ) as http:
            deadline = time.monotonic() + 60
            while not (place.exists() and _is_ready(http)):
                assert process.poll() is None and time.monotonic() < deadline, (
                    "the server is not ready"
                )
                time.sleep(0.05)
            if case == "full":  # it announces its address now
                wait_until(lambda: "standard output" in log.read_text())
            body = {"model": "preset:toy", "prompt": "hi", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    text = log.read_text()
    assert "Traceback" not in text
    assert ("standard output cannot be written: No space left on device" in text) is (
        case == "full"
    )


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
