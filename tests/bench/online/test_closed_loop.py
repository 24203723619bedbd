"""Streams of a server: arrival times by hand, and the whole benchmark on a small load."""

import json

import pytest

from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.online.closed_loop import Clocks, Stream, Target, read_stream, summarize
from orca_jax.tools.bench.online.exchange import Exchange
from orca_jax.values.errors import OrcaError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    data = (
        b"data: "
        + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode()
        + b"\n\n"
    )
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_an_event_is_seen_when_its_last_byte_came() -> None:
    second = chunk("b", "length")
    arrivals = [
        (1.0, HEAD + chunk("a") + second[:9]),
        (2.0, second[9:-3]),
        (3.0, second[-3:] + DONE),
    ]
    assert read_stream(Exchange(0.0, 0.0, 0.0, arrivals)) == Stream(
        [1.0, 3.0], ["a", "b"], "length"
    )


def test_comments_are_no_events() -> None:
    received = HEAD + b"5\r\n: hi\n\r\n" + b"1\r\n\n\r\n" + chunk("a") + DONE
    assert read_stream(Exchange(0.0, 0.0, 0.0, [(1.0, received)])).texts == ["a"]


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nfull", "answered 503: full"),
        (b"", "answered nothing"),
        (HEAD + chunk("a"), "without"),
        (
            HEAD + b'1a\r\ndata: {"error": {"message"\r\n12\r\n: "the engine"}}\n\n\r\n',
            "the engine",
        ),
    ],
)
def test_incomplete_streams_are_errors(received: bytes, message: str) -> None:
    with pytest.raises(OrcaError, match=message):
        read_stream(Exchange(0.0, 0.0, 0.0, [(1.0, received)]))


def test_ages_belong_to_the_event_that_began_the_group() -> None:
    stream = Stream([10.0, 10.5, 11.0], ["..0 00", "99000 01", "00500"], "length")
    assert [(at, round(age, 6)) for at, age in stream.ages()] == [(10.0, 0.1), (10.5, 0.45)]


def test_figures_are_of_the_part_in_which_all_run() -> None:
    streams = [
        Stream([0.0, 2.0, 4.0, 9.0], list("abcd"), "length"),
        Stream([1.0, 3.0, 5.0, 5.0], list("abcd"), "length"),
    ]
    clocks = Clocks(
        Target("", ""), [(0.0, 0, 0, 0), (1.0, 1.0, 2.0, 0.0), (5.0, 3.0, 2.5, 1.0), (9.0, 9, 9, 9)]
    )
    figures = summarize(streams, clocks)
    assert figures["tokens_per_s"] == 5 / 4 and figures["reads_per_s"] == 4 / 4, (
        "of 2, 3, 4, 5 and 5 seconds"
    )
    assert (
        figures["front_end_us_per_token"] == pytest.approx(2e6 / 5)
        and figures["front_end_busy"] == 0.5
    )
    assert figures["engine_us_per_token"] == pytest.approx(1e5) and "p50_age_ms" not in figures


def test_streams_that_do_not_overlap_say_nothing() -> None:
    with pytest.raises(OrcaError, match="overlap"):
        summarize(
            [Stream([0.0], ["a"], "length"), Stream([5.0], ["a"], "length")], Clocks(Target("", ""))
        )


def test_online_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["online", "--clients", "8", "--tokens", "160", "--pace", "5"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (figures,) = result["passes"]
    assert figures["model"] == "preset:clock-5"
    assert 0 < figures["tokens_per_s"] <= 1.05 * 8 / 0.005, (
        "no faster than the pace, by the clock of clients that wake late"
    )
    assert 0 < figures["p50_age_ms"] <= figures["p99_age_ms"] < 10_000
    assert result["config"]["clients"] == 8 and result["hardware"]["cores"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--clients", "0"], "clients"),
        (["--base-url", "http://127.0.0.1:1"], "base_url"),
        (["--model", "m"], "base_url"),
    ],
)
def test_flags_that_cannot_be(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["online", *flags]) == 2
    assert named in capsys.readouterr().err
