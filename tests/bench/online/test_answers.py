"""Received bytes become times of tokens, counts, or the kind of a failure."""

import pytest

from orca_jax.tools.bench.online.answers import CallOutcome, read_outcome
from orca_jax.tools.bench.online.exchange import Exchange
from tests.bench.online.fake import DONE, event, token, usage

# the body ends with the connection
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def read(*arrivals: tuple[float, bytes], failure: str = "") -> CallOutcome:
    return read_outcome(Exchange(0.0, 0.5, 0.75, arrivals, failure, failure, 9.0))


def chat(reason: str | None = None, **delta: object) -> bytes:
    return event({"choices": [{"delta": delta, "finish_reason": reason}]})


def test_times_are_those_of_the_last_byte_of_an_event() -> None:
    second = token("b", "length")
    outcome = read(
        (1.0, HEAD + token("a") + second[:9]),
        (2.0, second[9:-1]),
        (3.0, second[-1:] + usage(7, 2) + DONE),
    )
    assert outcome == CallOutcome(0.0, 0.5, 0.75, 3.0, [1.0, 3.0], 7, 2)


def test_chunked_answers() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
    first, rest = token("a"), token("b", "stop") + DONE
    parts = b"%x\r\n%s\r\n" % (len(first), first), b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest)
    assert read((1.0, head), (2.0, parts[0]), (4.0, parts[1])).token_times == [2.0, 4.0]


def test_server_sent_events_in_other_forms() -> None:
    lines = b'event: message\r\ndata:{"choices":[{"text":"a",\r\ndata: "finish_reason":"stop"}]}\r\n\r\n: ping\r\n\r\n'
    assert read((1.0, HEAD + b": hello\n\n"), (2.0, lines)).token_times == [2.0]


def test_a_chat_begins_with_its_first_text_and_ends_with_its_last_chunk() -> None:
    outcome = read(
        (1.0, HEAD + chat(role="assistant", content="")),
        (2.0, chat(reasoning_content="hm")),
        (3.0, chat(content="yes")),
        (4.0, chat("stop") + DONE),
    )
    assert (outcome.token_times, outcome.end, outcome.output_tokens) == ([2.0, 3.0], 4.0, 2)


def test_an_empty_text_is_a_token_unless_it_only_carries_the_reason() -> None:
    assert read(
        (1.0, HEAD + token("")), (2.0, token("é")), (3.0, token("", "stop") + DONE)
    ).token_times == [1.0, 2.0]


def test_several_tokens_of_one_event_are_counted_by_the_server() -> None:
    outcome = read((1.0, HEAD + token("abcd", "length") + usage(3, 4) + DONE))
    assert (outcome.output_tokens, outcome.token_times) == (4, [1.0])


@pytest.mark.parametrize(
    ("received", "failure", "detail"),
    [
        (b"", "stream_cut", "without an answer"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "http_503", "full"),
        (HEAD + token("a"), "stream_cut", "without"),
        (HEAD + token("a") + event({"error": {"message": "lost"}}), "stream_error", "lost"),
        (HEAD + b"<html>", "bad_stream", "html"),
        (HEAD + event([1]), "bad_stream", "1"),
        (HEAD + event({"choices": [{}]}), "bad_stream", "choices"),
        (HEAD + DONE, "no_tokens", "text"),
        (b"nonsense\r\n\r\n", "stream_cut", "not valid HTTP"),
    ],
)
def test_faults_have_kinds(received: bytes, failure: str, detail: str) -> None:
    outcome = read((1.0, received))
    assert outcome.failure == failure and detail in outcome.detail


def test_a_timeout_counts_even_after_tokens() -> None:
    assert read((1.0, HEAD + token("a")), failure="timeout").failure == "timeout"
    assert read(failure="connect").failure == "connect"


def test_a_reset_after_the_end_is_harmless() -> None:
    assert read((1.0, HEAD + token("a", "stop") + DONE), failure="stream_cut").failure == ""
