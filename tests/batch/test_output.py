"""The output: order, half rows, a full disk; and the ledger of what is done."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.batch.answers import Answer, RowSummary, answer_row, error_row, read_row, row_summary
from orca_jax.batch.ledger import Ledger
from orca_jax.batch.output import InputOrder, OutputFile, Writer, old_path
from orca_jax.batch.record import RunRecord, record_path, write_record
from orca_jax.batch.rows import BadLine, Row
from orca_jax.values.errors import ConfigError


@given(st.permutations(range(4, 12)))
def test_rows_leave_in_the_order_of_the_input(order: list[int]) -> None:
    held = InputOrder(4)
    written: list[bytes] = []
    for line in order:
        written.append(held.add_row(line, b"%d " % line))
        assert (held.held == 0) == (len(b"".join(written).split()) == order.index(line) + 1)
    assert b"".join(written) == b"4 5 6 7 8 9 10 11 "


@pytest.mark.parametrize("size", [0, 1, 40, 3_000_000])
def test_half_a_row_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / "out"
    whole = error_row("id", BadLine(1, None, "code", "message"))
    path.write_bytes(whole + b"\0" * size)
    record = RunRecord(1, "0", 0, 0, {})
    write_record(record, record_path(path))
    with OutputFile(path) as output:
        assert [row.id for row in output.recover(record)] == ["id"]
        assert path.stat().st_size == len(whole) + size, (
            "nothing is cut before the first row is there"
        )
        writer = Writer(output, lambda: None)
        writer.put(b"next\n")
        writer.finish()
    assert path.read_bytes() == whole + b"next\n"


def test_a_disk_that_is_full_ends_the_writer(tmp_path: Path) -> None:
    told = threading.Event()
    with OutputFile(tmp_path / "out") as output:
        os.close(output.descriptor)
        output.descriptor = os.open("/dev/full", os.O_RDWR)
        writer = Writer(output, told.set)
        writer.put(b"row\n")
        assert told.wait(60)
        writer.put(b"row\n")
        with pytest.raises(OSError, match=r"No space left on device: '.*/out'"):
            writer.finish()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link"])
def test_only_a_regular_file_is_an_output(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(
        ConfigError, match="is not a regular file; rows are appended and read again"
    ) as error:
        OutputFile(Path("/dev/null") if kind == "device" else path)
    assert error.value.param == "output"


def test_standard_output_is_for_the_summary(tmp_path: Path) -> None:
    """`-o /dev/stdout > rows` would mix rows and summary."""
    code = "from orca_jax.batch.output import *; check_regular(Path('/dev/stdout'), 'output')"
    with (tmp_path / "rows").open("w") as rows:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=rows, stderr=subprocess.PIPE, check=False
        )
    assert b"is standard output or standard error, for the summary" in ended.stderr


def test_an_output_renamed_while_it_was_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the process before may have overwritten it: then its new file is locked."""
    path, flock = tmp_path / "out", fcntl.flock
    path.write_bytes(b"old")

    def rename_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.rename(old_path(path))
        path.write_bytes(b"new")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", rename_before)
    with OutputFile(path) as output:
        assert os.pread(output.descriptor, 9, 0) == b"new"


def test_overwriting_keeps_a_symbolic_link_and_the_permissions(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    target, path = disk / "rows", tmp_path / "out"
    target.write_bytes(b"old row\n")
    target.chmod(0o640)
    path.symlink_to(target)
    with OutputFile(path, overwrite=True) as output:
        assert not list(output.recover(RunRecord(1, "0", 0, 0, {})))
        with pytest.raises(ConfigError, match="another process"):
            OutputFile(path)
        writer = Writer(output, lambda: None)
        writer.put(b"new row\n")
        writer.finish()
        with pytest.raises(ConfigError, match="another process"):
            OutputFile(path)
    assert (
        path.is_symlink()
        and target.read_bytes() == b"new row\n"
        and target.stat().st_mode & 0o777 == 0o640
    )
    assert (disk / "rows.old").read_bytes() == b"old row\n"


def test_what_is_written_can_be_read() -> None:
    row = Row(3, "ä", "/v1/completions", b"{}")
    body = b'{"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7}}'
    read = read_row(answer_row("id", row, Answer(200, "r", body)))
    assert read is not None and (read.id, read.custom_id, read.summary) == (
        "id",
        "ä",
        RowSummary(None, 2, 5),
    )
    read = read_row(error_row("id", BadLine(3, None, "empty_line", "message")))
    assert read is not None and (read.custom_id, read.summary) == (None, RowSummary("empty_line"))


@pytest.mark.parametrize(
    ("status", "body", "summary"),
    [
        (200, b'{"usage": null}', RowSummary()),
        (200, b"[]", RowSummary()),
        (200, b'{"usage": {"completion_tokens": 4}, "error": null}', RowSummary(None, 0, 4)),
        (
            400,
            b'{"error": {"type": "invalid_request_error", "code": null}}',
            RowSummary("400 invalid_request_error"),
        ),
        (
            404,
            b'{"error": {"type": "NotFoundError", "code": 404}}',
            RowSummary("404 NotFoundError"),
        ),
        (422, b'{"detail": []}', RowSummary("422")),
        (502, b'"no"', RowSummary("502")),
    ],
)
def test_answers_of_all_servers(status: int, body: bytes, summary: RowSummary) -> None:
    assert row_summary(status, body) == summary


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["a", "b", "c"]))))
def test_the_ledger_is_a_dictionary(calls: list[tuple[int, str]]) -> None:
    done: dict[int, str] = {}
    first: dict[str, int] = {}
    with Ledger() as ledger:
        for line, custom_id in calls:
            assert ledger.first_line(line, custom_id) == first.setdefault(custom_id, line)
            assert ledger.mark_done(line, custom_id) == (line not in done)
            assert ledger.is_done(line, done.setdefault(line, custom_id))
            assert ledger.num_done == len(done)
        assert not ledger.is_done(10, "a")
