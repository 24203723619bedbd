"""The files of the playground, its headers, and the routes of its data."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from starlette.types import Message

from orca_jax.link.feed import MAX_WATCHERS
from orca_jax.link.wire import Iterations
from orca_jax.serve.announcement import announcement
from orca_jax.serve.args import parse_args
from orca_jax.serve.playground.burst import MAX_BURST
from orca_jax.serve.playground.page import (
    FOLDER,
    MEDIA_TYPES,
    PALETTE,
    SHARED,
    file_text,
    page_paths,
)
from orca_jax.serve.playground.routes import _scheduler
from orca_jax.serve.root_path import RootPath
from orca_jax.server_config import ServerConfig
from orca_jax.timeline.page_data import KINDS
from orca_jax.timeline.palette import PAGE_FOLDER
from orca_jax.tools.deploy.ray_serve import read_settings
from orca_jax.values.config import EngineConfig
from tests.project.source import ROOT
from tests.serve.asgi import bearer, call, http_scope
from tests.serve.played import CONTEXT, Stage, on_stage, saying
from tests.timeline.test_live import WatchedLab
from tests.timeline.traced import ONE

ENGINE = EngineConfig(model="m")
KEYED = ServerConfig(ENGINE, api_key=("sk-one",))
DATA = ("/playground/settings", "/playground/iterations", "/playground/burst", "/playground/page")
SERVED = [path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES]
FILES = {name: file_text(name) for name in (*SERVED, *SHARED, PALETTE)}
LIBRARY = "marked.js"


def stage(config: ServerConfig | None = None) -> Stage:
    async def act(stage: Stage) -> Stage:
        return stage

    return on_stage(saying("x"), act, config)


def test_every_file_has_a_route_and_a_type() -> None:
    app = stage().app
    assert page_paths() == {"/", *(f"/playground/{name}" for name in FILES if name != "index.html")}
    for path in page_paths():
        answer = call(app, path)
        name = path.rpartition("/")[2] or "index.html"
        assert answer.status == 200 and answer.body.decode() == FILES[name], path
        kind = answer.header("content-type")
        assert kind is not None and kind.startswith(MEDIA_TYPES["." + name.rpartition(".")[2]])


@pytest.mark.parametrize("path", sorted(page_paths()))
def test_headers(path: str) -> None:
    app = stage().app
    answer = call(app, path)
    policy = dict(
        part.strip().split(" ", 1)
        for part in (answer.header("content-security-policy") or "").split(";")
    )
    assert (
        policy["default-src"] == "'none'"
        and policy["script-src"] == policy["connect-src"] == "'self'"
    )
    assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
    tag = answer.header("etag")
    assert tag is not None
    again = call(app, path, headers=[(b"if-none-match", tag.encode())])
    assert (again.status, again.body) == (304, b"")


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline() -> None:
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses or name == LIBRARY, name
        assert "innerHTML" not in text and "eval(" not in text, name
    page = FILES["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    used = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert "playground/main.js" in used
    assert {f"/{path.removeprefix('/')}" for path in used} <= page_paths()
    for name, text in FILES.items():
        for module in re.findall(r'from "\./([\w.]+)"', text):
            assert module in FILES, f"{name} imports {module}"


def test_both_pages_with_a_chart_have_one_legend() -> None:
    """Each page is plain HTML with a legend of its own; that of a timeline also explains its bars."""
    pages = (FILES["index.html"], (PAGE_FOLDER / "run.html").read_text(encoding="utf-8"))
    live, recorded = (
        re.findall(r'<li><i class="mark (\w+)"></i>([^<]+)</li>', page) for page in pages
    )
    assert live == recorded and {*KINDS, "end"} == {kind for kind, _ in live}


def test_the_page_is_open_and_its_data_is_not() -> None:
    app = stage(KEYED).app
    for path in page_paths():
        assert call(app, path).status == 200
    for path in DATA:
        assert call(app, path).status == call(app, path, headers=bearer("sk-two")).status == 401
    assert call(app, "/playground/settings", headers=bearer("sk-one")).status == 200
    for path in (
        "//",
        "/playground",
        "/playground/",
        "/playground/app.js/..",
        "/playground/../v1/models",
        "/%2e",
    ):
        assert call(app, path).status == 401


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"scheduler": "orca"}, "orca"),
        ({"scheduler": "policies/mine.py:Turns"}, "Turns"),
        ({"scheduler": "chunked", "scheduling_policy": "mine.orders:Short"}, "chunked, Short"),
    ],
)
def test_the_page_names_a_class_and_not_its_file(settings: dict[str, Any], shown: str) -> None:
    assert _scheduler(EngineConfig(model="preset:toy", **settings)) == shown


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "example.com"}, False),
        ({"uds": "socket"}, False),
        ({"host": "0.0.0.0", "playground": True}, True),
        ({"playground": False}, False),
    ],
)
def test_on_by_default_on_loopback_only(settings: dict[str, Any], is_on: bool) -> None:
    config = ServerConfig(ENGINE, **settings)
    assert config.has_playground is is_on
    answers = [
        call(stage(config).app, path).status
        for path in ("/", "/playground/main.js", "/playground/settings")
    ]
    assert answers == ([200, 200, 200] if is_on else [404, 404, 404])


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [
        ("", True),
        ("--no-playground", False),
        ("--host 0.0.0.0", False),
        ("--uds x --playground", True),
    ],
)
def test_the_flag_and_the_announcement(flags: str, is_on: bool) -> None:
    config = parse_args(flags.split())
    assert config.has_playground is is_on
    lines = announcement(config, "http://h:1", None).splitlines()
    assert ("playground in the browser: http://h:1/" in lines) is is_on


def test_replicas_have_no_playground_unless_it_is_asked_for() -> None:
    assert [read_settings(flags)[0].has_playground for flags in ([], ["--playground"])] == [
        False,
        True,
    ]


def test_without_the_playground_a_key_is_needed_for_all_paths() -> None:
    config = ServerConfig(ENGINE, api_key=("sk-one",), playground=False)
    assert call(stage(config).app, "/").status == 401


@pytest.mark.parametrize("target", ["/llm/", "/"], ids=["kept by the proxy", "stripped"])
def test_behind_a_path_prefix(target: str) -> None:
    config = ServerConfig(ENGINE, root_path="/llm", api_key=("sk-one",))
    answer = call(RootPath(stage(config).app, "/llm"), target)
    assert answer.status == 200 and b'<base href="/llm/">' in answer.body


def test_settings_while_the_model_loads_and_after() -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            return await http.get("/playground/settings")

    assert on_stage(saying("x"), act, is_ready=False).status_code == 503
    answer = on_stage(saying("x"), act).json()
    assert (answer["model"], answer["has_chat"], answer["scheduler"]) == ("m", False, "chunked")
    assert {kind: len(each) for kind, each in answer["examples"].items()} == {
        "chat": 3,
        "prompt": 3,
    }


def test_the_licence_of_the_library_is_in_the_notice() -> None:
    (version,) = re.findall(r"^ \* marked (v[\d.]+) ", FILES[LIBRARY], re.MULTILINE)
    notice = " ".join((ROOT / "NOTICE").read_text(encoding="utf-8").split())
    assert f"{LIBRARY} is marked {version}" in notice
    assert "MIT license" in notice and "Copyright (c) 2018+, MarkedJS" in notice
    assert "sourceMappingURL" not in FILES[LIBRARY], (
        "a browser would ask for a file that is not there"
    )


def test_the_stream_of_iterations() -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            request = asyncio.create_task(http.get("/playground/iterations"))
            while not stage.client.feed._watchers:
                await asyncio.sleep(0)
            stage.client.take_message(Iterations(b'{"a":1}\n{"b":2}\n'))
            for _ in range(100):  # turns of the event loop until the first lines have been sent
                await asyncio.sleep(0)
            stage.client.take_message(Iterations(b'{"c":3}\n'))
            stage.client.stop()
            return await request

    answer = on_stage(saying("x"), act)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    events = [event for event in answer.text.split("\n\n") if event and not event.startswith(":")]
    assert events == ['data: {"a":1}\ndata: {"b":2}', 'data: {"c":3}']


def test_dropped_lines_are_counted_in_the_stream() -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            request = asyncio.create_task(http.get("/playground/iterations"))
            while not stage.client.feed._watchers:
                await asyncio.sleep(0)
            for _ in range(200):
                stage.client.take_message(Iterations(b"{}\n"))
            stage.client.stop()
            return await request

    events = on_stage(saying("x"), act).text.split("\n\n")
    assert "event: dropped\ndata: 100" in events


def test_a_page_that_leaves_ends_its_watch() -> None:
    async def act(stage: Stage) -> list[bool]:
        sent: list[bool] = []
        stage.client.feed._send = lambda message: sent.append(message.is_on)
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        answer = asyncio.create_task(stage.app(http_scope("/playground/iterations"), receive, send))
        while not sent:
            await asyncio.sleep(0)
        gone.set()
        await answer
        return sent

    assert on_stage(saying("x"), act) == [True, False]


def test_a_head_request_watches_nothing() -> None:
    shown = stage()
    answer = call(shown.app, "/playground/iterations", "HEAD")
    assert (answer.status, answer.body) == (200, b"") and not shown.client.feed._watchers


def test_too_many_pages() -> None:
    async def act(stage: Stage) -> httpx.Response:
        watchers = [stage.client.feed.watch() for _ in range(MAX_WATCHERS)]
        async with stage.http() as http:
            answer = await http.get("/playground/iterations")
        assert watchers
        return answer

    answer = on_stage(saying("x"), act)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_watchers")


def burst(
    body: Any, headers: dict[str, str] | None = None, path: str = "/playground/burst"
) -> tuple[httpx.Response, Stage]:
    async def act(stage: Stage) -> tuple[httpx.Response, Stage]:
        async with stage.http() as http:
            content = json.dumps(body).encode()
            sent = {"content-type": "application/json", **(headers or {})}
            return await http.post(path, content=content, headers=sent), stage

    return on_stage(saying("x", reason="length"), act)


def test_a_burst_has_the_lengths_of_its_call() -> None:
    answer, stage = burst({"requests": [[5, 3], [20, 1], [7, 2]], "seed": 4})
    assert answer.status_code == 200 and answer.json()["requests"] == 3
    submitted = stage.link.submitted
    assert [(len(each.prompt_ids), each.params.max_tokens) for each in submitted] == [
        (5, 3),
        (20, 1),
        (7, 2),
    ]
    assert all(each.params.ignore_eos and max(each.prompt_ids) < 257 for each in submitted)
    assert len({each.params.cache_salt for each in submitted}) == 3, (
        "no request shares a prefix with another one"
    )
    assert [each.has_more for each in submitted] == [True, True, False], "they enter together"
    assert stage.ends() == {"length": 3}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"requests": []}, "length >= 1"),
        ({"requests": [[1, 1]] * (MAX_BURST + 1)}, f"length <= {MAX_BURST}"),
        ({"requests": [[0, 1]]}, ">= 1"),
        ({"requests": [[1, 5000]]}, "exceed the context"),
        ({"requests": [[1, 1]], "tokens": 3}, "unknown field"),
        ([], "Expected `object`"),
    ],
)
def test_a_wrong_burst_is_refused(body: Any, words: str) -> None:
    answer, stage = burst(body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert not stage.link.submitted


def test_a_burst_of_another_page_is_refused() -> None:
    """Browsers send other content types across origins without a question."""
    assert burst({"requests": [[1, 1]]}, {"content-type": "text/plain"})[0].status_code == 415


def watched() -> dict[str, list[dict[str, Any]]]:
    """The lines of a run of three requests as a page sends them; a fourth request is not of the burst."""
    lab = WatchedLab(max_bs=2, page_size=2, shape=ONE._replace(budget=8, num_pages=20))
    lines = lab.watch()
    for name, prompt, generated in (("A", 3, 4), ("B", 2, 5), ("C", 3, 2), ("other", 3, 9)):
        lab.add(name, prompt, generated)
    lab.run()
    found = {
        kind: [line[kind] for line in lines if kind in line]
        for kind in ("arrival", "iteration", "end")
    }
    arrivals, ends = (
        [each for each in found[kind] if each["n"] < 3] for kind in ("arrival", "end")
    )
    return {"arrivals": arrivals, "iterations": found["iteration"], "ends": ends}


def test_a_burst_is_saved_as_the_page_of_a_timeline() -> None:
    answer, _ = burst(watched(), path="/playground/page")
    assert answer.status_code == 200 and "attachment" in answer.headers["content-disposition"]
    assert answer.text.startswith("<!doctype html>") and "<title>m: chunked</title>" in answer.text
    (data,) = re.findall(r'id="recording">(.*?)</script>', answer.text)
    requests = json.loads(data)["requests"]
    assert [(each["prompt"], each["generated"], each["reason"]) for each in requests] == [
        (3, 4, "length"), (2, 5, "length"), (3, 2, "length"),
    ]  # fmt: skip


def test_a_saved_burst_begins_at_zero() -> None:
    """The engine has worked before the burst: its iterations and its clock do not begin there."""
    late: dict[str, Any] = watched()
    for each in (*late["arrivals"], *late["ends"]):
        each["at"] += 40.0
    for each in late["iterations"]:
        each["iteration"] += 280
        for name in ("selected", "planned", "submitted", "collected"):
            each[name] += 40.0
    found = []
    for body in (watched(), late):
        answer, _ = burst(body, path="/playground/page")
        (data,) = re.findall(r'id="recording">(.*?)</script>', answer.text)
        found.append(json.loads(data))
    early, other = found
    assert other["requests"] == early["requests"]
    assert other["iterations"] == early["iterations"]


@pytest.mark.parametrize("change", ["ends", "arrivals", "generated", "at", "other"])
def test_a_wrong_watched_burst_is_refused(change: str) -> None:
    body: dict[str, Any] = watched()
    if change in ("generated", "at"):
        body["ends"][0][change] = CONTEXT + 1 if change == "generated" else 1e308
    else:
        body[change] = []
    answer, _ = burst(body, path="/playground/page")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_burst"
