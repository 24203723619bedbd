"""Every public door is opened: the commands of lines.toml run, and no flag and no choice stands in none of them."""

import io
import re
import shlex
import ssl
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from orca_jax.cli.main import main
from tests.buckets.conftest import store
from tests.buckets.emulator import BUCKET, Emulator
from tests.cluster.hosts import start_worker
from tests.doors.places import VALUES, Places
from tests.doors.served import on_server
from tests.doors.walk import Door, commands
from tests.hub import fake_hub
from tests.hub.test_hub import connect
from tests.serve.running import Server, running

__all__ = ["store"]
LINES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("lines.toml").read_text(encoding="utf-8")
)
COMMANDS = commands()
EACH = "$each"
REMOTE = ("url", "hub", "bucket")
"""Places that are fixtures, for the lines that name them."""


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command of a line, and the words that follow it."""
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    return " ".join(words[:length]), list(words[length:])


def _lines(kind: str) -> Iterator[str]:
    """The lines of a kind; one with `EACH` stands for a line with each choice of the flag before it."""
    for line in LINES[kind]:
        if EACH not in line:
            yield line
            continue
        name, words = command_of(line.split())
        flag = words[words.index(EACH) - 1]
        doors = COMMANDS[name].doors()
        yield from (
            line.replace(EACH, door.choice) for door in doors if door.flag == flag and door.choice
        )


def lines(kind: str) -> list[str]:
    return list(_lines(kind))


def opened(kind: str, places: Places) -> Iterator[Door]:
    """The doors that the lines of a kind open."""
    for line in lines(kind):
        name, words = command_of(shlex.split(line))
        yield from COMMANDS[name].opened(places.filled(words))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a model on a hub of this machine."""
    files = {path.name: path.read_bytes() for path in Path(VALUES["gpt2"]).iterdir()}
    with fake_hub.running(fake_hub.FakeHub(files)) as found:
        connect(monkeypatch, found.url, tmp_path / "cache")
        yield fake_hub.NAME


@pytest.fixture
def bucket(store: Emulator) -> str:
    """A bucket and the path of a model in it."""
    store.put(Path(VALUES["gpt2"]), "models/one")
    return f"{BUCKET}/models/one"


@pytest.fixture
def url(server: Server) -> str:
    return server.url


def test_each_door_is_opened(tmp_path: Path) -> None:
    """A flag, a choice or a command without a line rots, because nobody sees that it fails."""
    places = Places(tmp_path, url="", hub="", bucket="")
    found = {door for kind in LINES for door in opened(kind, places)}
    missing = {door for command in COMMANDS.values() for door in command.doors()} - found
    assert not missing, f"lines.toml lacks: {', '.join(sorted(map(str, missing)))}"


@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize("line", lines("runs"))
def test_a_command_runs(
    line: str,
    places: Places,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    for name in REMOTE:
        if f"${name}" in line:
            places = places.having(name, request.getfixturevalue(name))
    status = main(places.filled(shlex.split(line)))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert re.search(LINES["runs"][line], shown.out, re.MULTILINE), shown.out


@pytest.mark.parametrize("line", lines("refuses"))
def test_a_command_is_refused_by_name(
    line: str, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(places.filled(shlex.split(line))) == 2
    assert LINES["refuses"][line] in capsys.readouterr().err


@pytest.mark.parametrize("line", lines("serves"))
def test_an_application_answers(line: str, places: Places) -> None:
    words = places.filled(shlex.split(line))
    headers = {"authorization": "Bearer k"}

    async def ask(http: httpx.AsyncClient) -> None:
        model = (await http.get("/v1/models", headers=headers)).json()["data"][0]["id"]
        asked = {"model": model, "max_tokens": 2}
        answer = await http.post("/v1/completions", json={**asked, "prompt": "hi"}, headers=headers)
        assert answer.status_code == 200, answer.text
        messages = [{"role": "user", "content": "hi"}]
        answer = await http.post(
            "/v1/chat/completions", json={**asked, "messages": messages}, headers=headers
        )
        assert answer.status_code == 200, answer.text

    on_server(words[1:], ask)


@pytest.mark.parametrize("line", lines("starts"))
def test_a_server_starts(line: str, places: Places) -> None:
    words = places.filled(shlex.split(line))[1:]
    tls: ssl.SSLContext | None = None
    if "--ssl-certfile" in words:
        tls = ssl.create_default_context(cafile=places["certificate"])
        tls.load_cert_chain(places["certificate"], places["key"])
    uds = Path(words[words.index("--uds") + 1]) if "--uds" in words else None
    with ExitStack() as ending:
        if "--nnodes" in words:
            worker = start_worker(*words, "--node-rank", "1")
            ending.callback(worker.communicate, timeout=60)
        server = ending.enter_context(running(*words, tls=tls, uds=uds))
        assert server.complete("hi", max_tokens=2).status_code == 200
