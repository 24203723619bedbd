"""A mirror of the Hub that is hostile or broken: nothing outside the cache, no endless answers."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from orca_jax.helpers.hub import HubModel, answers, download, models
from orca_jax.values.errors import ConfigError
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
def test_names_outside_the_cache_are_refused(
    header: dict[str, str], kind: str, hub: FakeHub, tmp_path: Path
) -> None:
    hub.headers = header
    message = refusal()
    assert (
        f"has the {kind} " in message
        and "not safe as the name of a file" in message
        and hub.url in message
    )
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
        (
            "tree",
            [{"type": "file", "path": "a", "size": 1, "oid": "0", "lfs": {"oid": OUT, "size": 1}}],
        ),
    ],
)
def test_names_in_lists_are_refused(kind: str, value: object, hub: FakeHub, tmp_path: Path) -> None:
    hub.lists[kind] = value
    assert "not safe as the name of a file" in refusal()
    assert not list(tmp_path.rglob("*outside*"))


@pytest.mark.parametrize(
    "to", ["/evil", "http://localhost/evil?x=/api/models/a", "/api/models/../evil"]
)
@pytest.mark.parametrize(("status", "form"), [(302, "{}"), (200, '<{}>; rel="next"')])
def test_lists_do_not_leave_the_api(to: str, status: int, form: str) -> None:
    """At another address the same names would be read without a check."""
    header = {"Link" if status == 200 else "Location": form.format(to)}
    request = httpx2.Request("GET", f"http://localhost/api/models/{NAME}/revision/main")
    with pytest.raises(ConfigError, match="not an address of the API"):
        answers._Answers(1).check(httpx2.Response(status, headers=header, request=request))


def test_pages_and_renamed_models_are_followed() -> None:
    url = f"http://localhost/mirror/api/models/{NAME}"
    header = {
        "Link": f'<{url}?cursor=a>; rel="next"',
        "Location": "/mirror/api/models/some-org/new-name",
    }
    answers._Answers(1).check(
        httpx2.Response(307, headers=header, request=httpx2.Request("GET", url))
    )


def test_a_mirror_cannot_choose_xet(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data would not be checked: the module for Xet has connections of its own."""
    monkeypatch.setattr(file_download, "xet_get", lambda **_: pytest.fail("Xet was used"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": "/xet"}
    assert (download(HubModel(NAME)) / "config.json").read_bytes() == FILES["config.json"]
    assert constants.HF_HUB_DISABLE_XET is False


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
    message = refusal()
    assert "is too slow: 0.00 MB in 0 s" in message and "HF_ENDPOINT" in message


def test_silence_has_a_limit_where_the_library_has_none() -> None:
    with httpx2.Client(timeout=None) as client:
        request = client.build_request(
            "GET", "http://localhost", timeout=httpx2.Timeout(None, connect=3)
        )
    answers._ask(request)
    assert request.extensions["timeout"] == {"connect": 3, "read": 60, "write": 60, "pool": 60}


def test_a_fast_download_of_many_windows_does_not_end(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
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
