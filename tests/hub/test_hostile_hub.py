"""A mirror of the Hub that is hostile or broken: nothing outside the cache, no endless answers."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from orca_jax.errors import ConfigError
from orca_jax.hub import HubModel, answers, download, models
from tests.hub.fake_hub import COMMIT, NAME, FakeHub, running
from tests.hub.test_hub import FILES, connect

OUT = "../../../../outside"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(FILES)) as found:
        connect(monkeypatch, found.url, tmp_path / "a" / "b" / "cache")
        yield found


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        download(HubModel(NAME))
    assert caught.value.param == "model"
    return caught.value.message


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"ETag": f'"{OUT}"'}, "ETag"),
        ({"ETag": f'W/"{OUT}"'}, "ETag"),
        ({"X-Linked-ETag": f'"{OUT}"'}, "ETag"),
        ({"ETag": '".."'}, "ETag"),
        ({"ETag": '"/etc/x"'}, "ETag"),
        ({"X-Repo-Commit": OUT}, "commit"),
    ],
)
def test_names_outside_the_cache_are_refused(header: dict[str, str], kind: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.headers = header
    message = refusal()
    assert f"has the {kind} " in message and "not safe as the name of a file" in message and hub.url in message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not list(tmp_path.rglob("*outside*"))


def test_a_redirect_to_the_api_is_checked_too() -> None:
    header = {"ETag": f'"{OUT}"', "X-Repo-Commit": COMMIT}
    request = httpx2.Request("HEAD", f"http://localhost/api/models/{NAME}/tree/{COMMIT}")
    with pytest.raises(ConfigError, match="has the ETag"):
        answers._Answers(1).check(httpx2.Response(200, headers=header, request=request))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("revision", {"id": NAME, "sha": OUT, "siblings": []}),
        ("tree", [{"type": "file", "path": "a", "size": 1, "oid": "0", "lfs": {"oid": OUT, "size": 1}}]),
    ],
)
def test_names_in_lists_are_refused(kind: str, value: object, hub: FakeHub, tmp_path: Path) -> None:
    hub.lists[kind] = value
    assert "not safe as the name of a file" in refusal()
    assert not list(tmp_path.rglob("*outside*"))


def test_tags_of_mirrors_are_taken(hub: FakeHub) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.headers = {"ETag": 'W/"65f0-61a.b_c-5"'}
    folder = download(HubModel(NAME), needs_weights=False)
    assert (folder / "config.json").read_bytes() == FILES["config.json"]


def test_bodies_without_an_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MAX_SETTINGS_BYTES", 10**6)
    hub.body = itertools.repeat(bytes(10**5))
    assert "has more than the 1000000 bytes that it may have" in refusal()


def test_encoded_bodies(hub: FakeHub) -> None:
    hub.headers = {"Content-Encoding": "gzip"}
    assert "is encoded as 'gzip'" in refusal()


def test_lists_without_an_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.next_page = f"/api/models/{NAME}/tree/{COMMIT}"
    monkeypatch.setattr(answers, "MAX_LISTS", 20)
    assert "is one of more than 20 lists" in refusal()
    monkeypatch.setattr(answers, "MAX_LISTS", 1000)
    monkeypatch.setattr(answers, "MAX_LIST_BYTES", 2**14)
    assert "has lists of more than 0 MiB" in refusal()


def test_a_slow_download_ends(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(part: bytes) -> bytes:
        threading.Event().wait(0.02)  # `time.sleep` does nothing here: see `connect`
        return part

    monkeypatch.setattr(answers, "WINDOW_SECONDS", 0.2)
    hub.body = map(drop, itertools.repeat(b"0"))
    begin = time.monotonic()
    message = refusal()
    assert "is too slow: 0.00 MB in 0 s" in message and "HF_ENDPOINT" in message
    assert time.monotonic() - begin < 5


def test_silence_has_a_limit_where_the_library_has_none() -> None:
    with httpx2.Client(timeout=None) as client:
        request = client.build_request("GET", "http://localhost", timeout=httpx2.Timeout(None, connect=3))
    answers._ask(request)
    assert request.extensions["timeout"] == {"connect": 3, "read": 60, "write": 60, "pool": 60}


def test_a_fast_download_of_many_windows_does_not_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(answers, "MIN_BYTES", 1)
    assert download(HubModel(NAME)).name == COMMIT


def test_the_users_own_client_is_used_and_comes_back(hub: FakeHub) -> None:
    made: list[httpx2.Client] = []

    def factory() -> httpx2.Client:
        made.append(_http.default_client_factory())
        return made[-1]

    huggingface_hub.set_client_factory(factory)
    try:
        download(HubModel(NAME))
        assert made and _http._GLOBAL_CLIENT_FACTORY is factory
    finally:
        huggingface_hub.set_client_factory(_http.default_client_factory)
