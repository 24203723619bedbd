"""Servers that stall, fail and cut streams, and servers of another kind."""

import argparse
import json
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.online.command import add_args
from orca_jax.tools.bench.online.load import run_load
from orca_jax.tools.bench.online.server import look_at
from orca_jax.tools.bench.online.settings import OpenLoopSettings, read_settings
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.errors import ConfigError
from tests.bench.online.fake import CUT, DONE, Step, complete, event, fake_server, token


def settings(url: str, *flags: str) -> OpenLoopSettings:
    parser = argparse.ArgumentParser()
    add_args(parser)
    return read_settings(parser.parse_args(["--base-url", url, *flags]), ())


def run_online(
    url: str, capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0
) -> tuple[dict[str, Any], str]:
    assert (
        main(["online", "--base-url", url, "--num-requests", "6", "--warmup-requests", "0", *flags])
        == status
    )
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_every_failure_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    is_over = threading.Event()

    def stall() -> Iterator[Step]:
        yield token()
        is_over.wait(60)

    def play(number: int, body: dict[str, Any]) -> tuple[int, bytes] | Iterable[Step]:
        answers: dict[int, tuple[int, bytes] | Iterable[Step]] = {
            1: (429, b"slow down"),
            2: stall(),
            3: [token(), CUT],
            4: [token(), event({"error": {"message": "engine lost"}}), DONE],
        }
        return answers.get(number, complete(body))  # the first call is the probe

    with fake_server(play) as server:
        result, out = run_online(server.url, capsys, "--timeout", "3")
        is_over.set()
    assert result["errors"] == {"http_429": 1, "timeout": 1, "stream_cut": 1, "stream_error": 1}
    assert (result["completed"], result["failed"]) == (2, 4) and "engine lost" in out
    assert result["passes"][0]["failed"] == 4 and "warning: 4 requests failed" in out


def test_requests_leave_at_their_times_although_none_has_ended() -> None:
    are_all_sent = threading.Event()

    def play(number: int, body: dict[str, Any]) -> Iterable[Step]:
        if number == 8:
            are_all_sent.set()
        if number:
            are_all_sent.wait(60)
        yield from complete(body)

    with fake_server(play) as server:
        target = look_at(settings(server.url))
        planned = [WorkloadRequest(index / 20, (1, 2), 2) for index in range(8)]
        load = run_load(target, planned, timeout=60)
    sent = [outcome.sent for outcome in load.outcomes]
    assert sent[-1] < min(outcome.end for outcome in load.outcomes)
    assert all(outcome.sent >= outcome.due and not outcome.failure for outcome in load.outcomes)
    assert [body["max_tokens"] for body in server.bodies] == [2] * 9


def test_all_failed_is_an_error_after_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    def play(number: int, body: dict[str, Any]) -> tuple[int, bytes] | Iterable[Step]:
        return (503, b"full") if number else complete(body)

    with fake_server(play) as server:
        result, _ = run_online(server.url, capsys, status=2)
    assert result["errors"] == {"http_503": 6} and result["median_ttft_ms"] is None


def test_a_plain_chat_server(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no list of models, no usage, no [DONE], and refuses fields that are not OpenAI's first ones."""

    def play(number: int, body: dict[str, Any]) -> tuple[int, bytes] | Iterable[Step]:
        if body.keys() - {"model", "messages", "max_tokens", "temperature", "stream"}:
            return 400, b"unknown field"
        text = [{"content": word} for word in ("one ", "two ")]
        deltas = [{"role": "assistant", "content": ""}, *text]
        return [
            *(
                event({"choices": [{"delta": delta, "finish_reason": None}]}, b"\r\n\r\n")
                for delta in deltas
            ),
            event({"choices": [{"delta": {}, "finish_reason": "stop"}]}, b"\r\n\r\n"),
        ]

    with fake_server(play, models=()) as server:
        flags = ["--endpoint", "chat", "--model", "other", "--api-key", "secret"]
        result, out = run_online(f"{server.url}/v1/", capsys, *flags)
        body = server.bodies[-1]
    assert (
        result["completed"] == 6
        and result["total_output_tokens"] == 12
        and result["uncounted_by_server"] == 6
    )
    assert (result["uses_token_ids"], result["ignores_eos"]) == (False, False)
    assert body["model"] == "other" and 0 < len(body["messages"][0]["content"].split()) <= 512
    assert set(server.keys) == {"Bearer secret"} and "secret" not in out


def test_texts_have_the_requested_length_by_the_servers_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play(number: int, body: dict[str, Any]) -> tuple[int, bytes] | Iterable[Step]:
        if not isinstance(body["prompt"], str):
            return 400, b"token ids are not supported"
        counts = {"prompt_tokens": 10 + 3 * len(body["prompt"].split()), "completion_tokens": 1}
        return [token("a", "stop"), event({"choices": [], "usage": counts}), DONE]

    with fake_server(play) as server:
        target = look_at(settings(server.url))
        assert (target.form.tokens_per_word, target.form.overhead, target.form.uses_ids) == (
            3.0,
            10.0,
            False,
        )
        result, _ = run_online(server.url, capsys)
    wanted = {len(target.form.text(range(length)).split()) * 3 + 10 for length in (100, 400)}
    assert wanted == {100, 400}
    assert result["other_output_lengths"] > 0, "it accepts ignore_eos, but does not honour it"


@pytest.mark.parametrize(
    ("answer", "flags", "param"),
    [
        ((401, b"no key"), (), "api_key"),
        ((404, b"no such route"), (), "endpoint"),
        ((503, b"busy"), (), "base_url"),
        ((400, b"no ids"), ("--prompts", "ids"), "base_url"),
        ([2.0], ("--timeout", "0.2"), "timeout"),
        ([], ("--model", "gone"), "model"),
    ],
)
def test_a_server_that_cannot_be_used(
    answer: tuple[int, bytes] | list[Step], flags: tuple[str, ...], param: str
) -> None:
    with fake_server(lambda number, body: answer) as server, pytest.raises(ConfigError) as caught:
        look_at(settings(server.url, *flags))
    assert caught.value.param == param


def test_models_are_listed_if_none_can_be_chosen() -> None:
    with fake_server(lambda number, body: [], models=("small", "large")) as server:
        for flags in ((), ("--model", "huge")):
            with pytest.raises(ConfigError, match="small, large"):
                look_at(settings(server.url, *flags))


def test_settings_say_that_rates_are_infinite() -> None:
    assert settings("http://h").rates == [math.inf]
