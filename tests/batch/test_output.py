"""The output: order, half rows, a full disk; and the ledger of what is done."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.batch.answers import Answer, RowSummary, answer_row, error_row, read_row, row_summary
from orca_jax.batch.ledger import Ledger
from orca_jax.batch.output import InputOrder, OutputFile, Writer
from orca_jax.batch.rows import BadLine, Row


@given(st.permutations(range(4, 12)))
def test_rows_leave_in_the_order_of_the_input(order: list[int]) -> None:
    held = InputOrder(4)
    written: list[bytes] = []
    for line in order:
        written.append(held.add(line, b"%d " % line))
        assert (held.held == 0) == (len(b"".join(written).split()) == order.index(line) + 1)
    assert b"".join(written) == b"4 5 6 7 8 9 10 11 "


@pytest.mark.parametrize("size", [0, 1, 40, 3_000_000])
def test_half_a_row_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / "out"
    whole = error_row("id", BadLine(1, None, "code", "message"))
    path.write_bytes(whole + b"\0" * size)
    with OutputFile(path) as output:
        assert [row.id for row in output.recover()] == ["id"]
        writer = Writer(output, lambda: None)
        writer.put(b"next\n")
        writer.finish()
    assert path.read_bytes() == whole + b"next\n"


def test_a_disk_that_is_full_ends_the_writer() -> None:
    told = threading.Event()
    with OutputFile(Path("/dev/full")) as output:
        writer = Writer(output, told.set)
        writer.put(b"row\n")
        assert told.wait(10)
        writer.put(b"row\n")
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            writer.finish()


def test_what_is_written_can_be_read() -> None:
    row = Row(3, "ä", "/v1/completions", b"{}")
    body = b'{"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7}}'
    read = read_row(answer_row("id", row, Answer(200, "r", body)))
    assert read is not None and (read.id, read.custom_id, read.summary) == ("id", "ä", RowSummary(None, 2, 5))
    read = read_row(error_row("id", BadLine(3, None, "empty_line", "message")))
    assert read is not None and (read.custom_id, read.summary) == (None, RowSummary("empty_line"))


@pytest.mark.parametrize(
    ("status", "body", "summary"),
    [
        (200, b'{"usage": null}', RowSummary()),
        (200, b"[]", RowSummary()),
        (200, b'{"usage": {"completion_tokens": 4}, "error": null}', RowSummary(None, 0, 4)),
        (400, b'{"error": {"type": "invalid_request_error", "code": null}}', RowSummary("400 invalid_request_error")),
        (404, b'{"error": {"type": "NotFoundError", "code": 404}}', RowSummary("404 NotFoundError")),
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
