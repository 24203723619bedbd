"""`orca-jax generate` and `orca-jax chat`: an engine in this process, a server, and wrong input."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from orca_jax.cli import remote
from orca_jax.cli.chat import TerminalChat
from orca_jax.cli.main import main
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams
from tests.sim.oracle import toy_generate

TOY = ["--model", "preset:toy"]


def toy_text(prompt: str, max_tokens: int) -> str:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    ids = toy_generate(list(prompt.encode()), params, vocab_size=257, eos_token_ids=(256,))
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def test_generate_prints_the_continuation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "abc", *TOY, "--max-tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == toy_text("abc", 8) + "\n"


def test_generate_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert main(["generate", *TOY, "--max-tokens", "8", "--temperature", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"model": "preset:toy", "prompt": "abc", "text": toy_text("abc", 8)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "standard input is empty; give PROMPT"),
        (
            ["generate", "a", "--temperature", "9"],
            "temperature must be a number in [0, 2], got 9.0",
        ),
        (["generate", "a", "--max-tokens", "0"], "max_tokens must be an integer >= 1, got 0"),
        (["generate", "a", "--api-key-file", "k"], "--api-key-file: needs --base-url"),
        (
            ["generate", "a", "--base-url", "http://x", "--dtype", "float32"],
            "--dtype: has no effect on the server",
        ),
        (
            ["generate", "a", "--base-url", "localhost:1"],
            "--base-url: must begin with http:// or https://",
        ),
        (["generate", "a", "--model", "/nowhere"], "--model: /nowhere is not a directory"),
        (["chat", "--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) in (1, 2)
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and message in shown and shown.count("\n") == 1


def test_chat_answers_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\n/nothing\nde\n/exit\nnever read\n"))
    assert (
        main(["chat", *TOY, "--max-tokens", "4", "--temperature", "0", "--system", "Be brief."])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1] == "there is no command /nothing; /help lists them"


class Echo:
    """A model that answers with the number of messages."""

    name = "echo"

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def continuation(self, prompt: str) -> Iterator[str]:
        yield prompt

    def answer(self, messages: Sequence[Any]) -> Iterator[str]:
        self.seen.append(list(messages))
        yield str(len(messages))
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        if messages[-1]["content"] == "long":
            raise RequestError("too long", "messages")


def roles(chat: TerminalChat) -> str:
    return "".join(message["role"][0] for message in chat.messages)


def test_commands_change_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    chat = TerminalChat(Echo(), "Be brief.")
    for line, left in [
        ("a", "sua"),
        ("b", "suaua"),
        ("/undo", "sua"),
        ("/undo", "s"),
        ("/undo", "s"),
        ("c", "sua"),
    ]:
        assert chat.take_line(line) and roles(chat) == left
    assert chat.take_line("stop") and roles(chat) == "suaua", "a stopped answer is kept"
    assert chat.take_line("long") and roles(chat) == "suaua" and chat.num_failed == 1
    assert chat.take_line("/clear") and roles(chat) == "s"
    assert chat.take_line("/system Sing.") and chat.messages == [
        {"role": "system", "content": "Sing."}
    ]
    assert chat.take_line("/system") and chat.messages == []
    assert chat.take_line("/help") and not chat.take_line("/exit")
    shown = capsys.readouterr()
    assert (
        "4 [stopped]" in shown.out
        and "error: too long; /clear" in shown.err
        and "/undo" in shown.out
    )


def served(handler: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answer the client's calls by `handler`; return the list of bodies."""
    bodies: list[Any] = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append((request.url.path, request.headers.get("authorization"), request.content))
        answer: httpx.Response = handler(request)
        return answer

    made = httpx.Client
    monkeypatch.setattr(
        remote.httpx,
        "Client",
        lambda **options: made(transport=httpx.MockTransport(respond), **options),
    )
    return bodies


def events(*choices: Any) -> httpx.Response:
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    return httpx.Response(200, text="".join([*lines, ": comment\n\n", "data: [DONE]\n\n"]))


def test_a_server_continues_and_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        is_chat = request.url.path == "/v1/chat/completions"
        return (
            events({"delta": {"content": "Hel"}}, {"delta": {"content": "lo"}})
            if is_chat
            else events({"text": "x"})
        )

    bodies = served(handler, monkeypatch)
    flags = [
        "--base-url",
        "http://host/v1/",
        "--api-key-file",
        str(key),
        "--max-tokens",
        "5",
        "--sampling-seed",
        "3",
    ]
    assert main(["generate", "a", *flags, "--raw"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("b\n"))
    assert main(["chat", *flags, "--model", "named", "--temperature", "0", "--stop", "z"]) == 0
    assert main(["generate", "a", *flags, "--temperature", "1", "--top-p", "1", "--raw"]) == 0
    assert capsys.readouterr().out == "x\nHello\nx\n"
    paths = ["/v1/models", "/v1/completions", "/v1/chat/completions"]
    assert [path for path, _, _ in bodies] == [*paths, *paths[:2]]
    assert {header for _, header, _ in bodies} == {"Bearer secret"}
    common = {"stream": True, "max_tokens": 5, "seed": 3}
    assert json.loads(bodies[1][2]) == {"model": "m", "prompt": "a", **common}
    explicit = {"temperature": 1.0, "top_p": 1.0}  # the model's own defaults may be others
    assert json.loads(bodies[4][2]) == {"model": "m", "prompt": "a", **explicit, **common}
    message = {"role": "user", "content": "b"}
    assert json.loads(bodies[2][2]) == {
        "model": "named",
        "messages": [message],
        "temperature": 0.0,
        "stop": ["z"],
        **common,
    }


@pytest.mark.parametrize(("has_template", "shown"), [(True, "Hi"), (False, "x")])
def test_generate_answers_by_the_chat_template(
    has_template: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = httpx.Response(400, json={"error": {"message": "none", "code": "no_chat_template"}})

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            return events({"text": "x"})
        return events({"delta": {"content": "Hi"}}) if has_template else refused

    bodies = served(handler, monkeypatch)
    assert main(["generate", "a", "--base-url", "http://host", "--model", "m"]) == 0
    assert capsys.readouterr().out == f"{shown}\n"
    assert json.loads(bodies[0][2])["messages"] == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx.Response(400, json={"error": {"message": "prompt is too long"}}),
            "answered 400: prompt is too long",
        ),
        (httpx.Response(503, text="<html>"), "answered 503: <html>"),
        (
            httpx.Response(200, text='data: {"error": {"message": "engine lost"}}\n\n'),
            "engine lost",
        ),
    ],
)
def test_errors_of_a_server(
    response: httpx.Response,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served(lambda request: response, monkeypatch)
    assert main(["generate", "a", "--base-url", "http://host", "--model", "m"]) in (1, 2)
    assert message in capsys.readouterr().err
