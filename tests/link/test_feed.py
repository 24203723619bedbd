"""The feed of iterations: an engine without a watcher sends none, and a slow watcher loses old lines."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.link.client import EngineClient
from orca_jax.link.engine_watch import EngineWatch
from orca_jax.link.feed import MAX_UNREAD, MAX_WATCHERS, Feed, FeedFull
from orca_jax.link.wire import FromFrontEnd, Iterations, Message, Ready, Watch
from orca_jax.sched.observer import Observers
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

READY = Ready("", "byte", 257, 64, 1000, 8)
LINE = b'{"end":{}}\n'


def in_loop(act: Callable[[Feed, list[Watch]], Awaitable[None]]) -> None:
    async def run() -> None:
        sent: list[Watch] = []
        await act(Feed(sent.append), sent)

    asyncio.run(run())


def test_the_engine_is_asked_while_a_page_watches() -> None:
    async def act(feed: Feed, sent: list[Watch]) -> None:
        feed.resume()
        assert sent == [], "a new engine without a watcher"
        with feed.watch() as first:
            with feed.watch():
                assert sent == [Watch(True), Watch(True)], "each page needs the state of the engine"
            assert len(sent) == 2
            feed.take_lines(LINE)
            assert await first.receive(1) == (LINE, 0)
        assert sent[2:] == [Watch(False)]

    in_loop(act)


def test_a_wait_without_news_ends() -> None:
    async def act(feed: Feed, sent: list[Watch]) -> None:
        with feed.watch() as watcher:
            assert await watcher.receive(0.001) == (b"", 0)

    in_loop(act)


def test_a_slow_watcher_loses_the_oldest_lines_and_gets_a_new_start() -> None:
    async def act(feed: Feed, sent: list[Watch]) -> None:
        with feed.watch() as slow, feed.watch() as quick:
            for number in range(MAX_UNREAD + 3):
                feed.take_lines(b"%d\n" % number * 2)
                assert await quick.receive(1) == (b"%d\n" % number * 2, 0)
            assert len(sent) == 2
            news = await slow.receive(1)
            assert news is not None and news.num_dropped == 6
            assert news.lines.startswith(b"3\n3\n4\n") and news.lines.count(b"\n") == 2 * MAX_UNREAD
            assert sent[2:] == [Watch(True)]
            feed.take_lines(LINE)
            assert await slow.receive(1) == (LINE, 0)

    in_loop(act)


def test_the_end_of_the_server_ends_all_watches() -> None:
    async def act(feed: Feed, sent: list[Watch]) -> None:
        with feed.watch() as watcher:
            feed.take_lines(LINE)
            feed.close()
            assert await watcher.receive(1) == (LINE, 0)
            assert await watcher.receive(1) is None
            with feed.watch() as late:
                assert await late.receive(1) is None
        assert sent == [Watch(True)]

    in_loop(act)


def test_watchers_are_bounded() -> None:
    async def act(feed: Feed, sent: list[Watch]) -> None:
        watchers = [feed.watch() for _ in range(MAX_WATCHERS)]
        with pytest.raises(FeedFull):
            feed.watch()
        watchers[0].__exit__(None, None, None)
        feed.watch()

    in_loop(act)


class SentLink:
    """Keeps what the client sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: FromFrontEnd) -> None:
        self.sent.append(message)


def test_a_restarted_engine_is_watched_again() -> None:
    async def run() -> None:
        client = EngineClient(ServerConfig())
        first, second = SentLink(), SentLink()
        client.attach(first)
        client.serve(READY)
        with client.feed.watch() as watcher:
            client.take_message(Iterations(LINE))
            assert await watcher.receive(1) == (LINE, 0)
            client.lose("dead")
            client.attach(second)
            assert second.sent == [], "it does not serve yet"
            client.serve(READY)
            assert (first.sent, second.sent) == ([Watch(True)], [Watch(True)])
            client.stop()
            assert await watcher.receive(1) is None

    asyncio.run(run())


def lines_of(sent: list[Message]) -> list[dict[str, Any]]:
    assert all(isinstance(message, Iterations) for message in sent)
    return [json.loads(line) for message in sent for line in message.lines.splitlines()]  # type: ignore[union-attr]


@pytest.mark.parametrize("has_own", [False, True])
def test_an_engine_has_its_own_observer_while_no_page_watches(has_own: bool) -> None:
    config = EngineConfig(model="preset:toy", max_model_len=64)
    with build_engine(config) as built, ExitStack() as watching:
        engine, sent = built.engine, list[Message]()
        if has_own:
            watching.enter_context(engine.observed_by(Observers()))
        own = engine.observer
        watch = EngineWatch(engine, built.timeline_header, sent.append)

        def run(name: str) -> None:
            engine.add_request(name, [1, 2, 3], SamplingParams(4, ignore_eos=True))
            while engine.has_work:
                engine.step()

        run("A")
        watch.turn(False)
        assert sent == [] and engine.observer is own
        watch.turn(True)
        run("B")
        watch.turn(True)
        kinds = [next(iter(line)) for line in lines_of(sent)]
        assert kinds == ["start", "arrival", *["iteration"] * 4, "end", "start"]
        watch.turn(False)
        sent.clear()
        run("C")
        assert sent == [] and engine.observer is own
