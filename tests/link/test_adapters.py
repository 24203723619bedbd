"""Calls that change the adapters of the engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orca_jax.errors import RequestError
from orca_jax.link.adapters import AdapterCalls
from orca_jax.link.client import EngineClient
from orca_jax.link.errors import Unavailable
from orca_jax.link.wire import AdapterAnswer, FromFrontEnd, LoadAdapter, Ready, UnloadAdapter
from orca_jax.server_config import ServerConfig

Sent = list[LoadAdapter | UnloadAdapter]


def run(act: Callable[[AdapterCalls, Sent], Awaitable[None]]) -> None:
    async def with_calls() -> None:
        sent: Sent = []
        await act(AdapterCalls(sent.append), sent)

    asyncio.run(asyncio.wait_for(with_calls(), 10))


async def started(change: Awaitable[None]) -> asyncio.Task[None]:
    task = asyncio.ensure_future(change)
    await asyncio.sleep(0)
    return task  # type: ignore[return-value]


def test_changes_wait_for_their_own_answers() -> None:
    async def act(calls: AdapterCalls, sent: Sent) -> None:
        first, second = await started(calls.load("a", "x")), await started(calls.load("b", "y"))
        calls.take(AdapterAnswer(sent[1].number, "no", "lora_path"))
        with pytest.raises(RequestError, match="no") as error:
            await second
        assert error.value.param == "lora_path" and not first.done()
        calls.take(AdapterAnswer(sent[0].number))
        await first
        assert calls.loaded == {"a": "x"}
        gone = await started(calls.unload("a"))
        calls.take(AdapterAnswer(sent[2].number))
        await gone
        assert calls.loaded == {}

    run(act)


def test_a_change_counts_although_its_caller_has_gone() -> None:
    """The next caller would load the adapter again otherwise, and the engine would refuse it."""

    async def act(calls: AdapterCalls, sent: Sent) -> None:
        changes: list[tuple[Awaitable[None], dict[str, str]]] = [
            (calls.load("a", "x"), {"a": "x"}),
            (calls.unload("a"), {}),
        ]
        for change, loaded in changes:
            task = await started(change)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            calls.take(AdapterAnswer(sent[-1].number))
            assert calls.loaded == loaded

    run(act)


def test_a_lost_engine_ends_all_changes() -> None:
    async def act(calls: AdapterCalls, sent: Sent) -> None:
        task = await started(calls.load("a", "x"))
        calls.fail(Unavailable("the engine has ended"))
        with pytest.raises(Unavailable):
            await task
        calls.take(AdapterAnswer(sent[0].number))
        assert calls.loaded == {}

    run(act)


def test_the_stop_of_the_server_ends_all_changes() -> None:
    class Silent:
        """A link to an engine without answers."""

        def send(self, message: FromFrontEnd) -> None:
            pass

    async def act() -> None:
        client = EngineClient(ServerConfig())
        client.attach(Silent())
        client.serve(Ready("", "byte", vocab_size=257, max_model_len=64, n_slots=1000, num_rows=2))
        task = await started(client.adapters.load("a", "x"))
        client.stop()
        with pytest.raises(Unavailable):
            await task

    asyncio.run(asyncio.wait_for(act(), 10))


def test_a_new_engine_gets_what_calls_have_loaded(caplog: pytest.LogCaptureFixture) -> None:
    async def act(calls: AdapterCalls, sent: Sent) -> None:
        for name in "ab":
            task = await started(calls.load(name, name.upper()))
            calls.take(AdapterAnswer(sent[-1].number))
            await task
        calls.load_again(("b",))
        kinds = [(type(each), each.name) for each in sent[2:]]
        assert kinds == [(LoadAdapter, "a"), (UnloadAdapter, "b"), (LoadAdapter, "b")], "b was another adapter"
        for each, error in zip(sent[2:], (None, None, "gone"), strict=True):
            calls.take(AdapterAnswer(each.number, error))
        assert calls.loaded == {"a": "A"}
        assert "the adapter b cannot be loaded again: gone" in caplog.text

    run(act)
