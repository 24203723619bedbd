"""Calls that change the adapters of the engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orca_jax.errors import RequestError
from orca_jax.link.adapters import MOST_ENDS, AdapterCalls
from orca_jax.link.client import EngineClient
from orca_jax.link.errors import Unavailable
from orca_jax.link.wire import AdapterAnswer, FromFrontEnd, LoadAdapter, Ready, UnloadAdapter
from orca_jax.server_config import ServerConfig

Sent = list[LoadAdapter | UnloadAdapter]


def run(act: Callable[[AdapterCalls, Sent], Awaitable[None]]) -> None:
    async def with_calls() -> None:
        sent: Sent = []
        await act(AdapterCalls(sent.append), sent)

    asyncio.run(asyncio.wait_for(with_calls(), 60))


async def started[T](change: Awaitable[T]) -> asyncio.Task[T]:
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

    asyncio.run(asyncio.wait_for(act(), 60))


async def loaded_both(calls: AdapterCalls, sent: Sent) -> None:
    for name in "ab":
        task = await started(calls.load(name, name.upper()))
        calls.take(AdapterAnswer(sent[-1].number))
        await task
    sent.clear()


def test_a_new_engine_gets_the_adapters_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    async def act(calls: AdapterCalls, sent: Sent) -> None:
        first, sent = sent, []
        await loaded_both(calls, first)
        again = await started(calls.load_again(sent.append, asyncio.Event()))
        await asyncio.sleep(0)
        for name, error in (("a", None), ("b", "gone")):
            assert sent[-1] == LoadAdapter(sent[-1].number, name, name.upper())
            calls.take(AdapterAnswer(sent[-1].number, error))
            await asyncio.sleep(0.001)
        assert await again is True and len(sent) == 2
        assert (calls.loaded, calls.lost) == ({"a": "A"}, {"b": "gone"})
        assert "the adapter b is not loaded any more: gone; requests for it are refused" in caplog.text
        calls.lost["a"] = "as if"
        await loaded_both(calls, first)
        assert calls.lost == {}, "a call may load it again"

    run(act)


def test_an_adapter_that_ends_two_engines_is_dropped() -> None:
    async def act(calls: AdapterCalls, sent: Sent) -> None:
        await loaded_both(calls, sent)
        for turn in range(MOST_ENDS):
            assert (calls.loaded, calls.lost) == ({"a": "A", "b": "B"}, {}), turn
            ended = asyncio.Event()
            again = await started(calls.load_again(sent.append, ended))
            await asyncio.sleep(0)
            ended.set()
            assert await again is False
        assert calls.loaded == {"b": "B"} and calls.lost == {"a": "2 engines ended while they loaded it again"}
        assert [each.name for each in sent] == ["a", "a"]

    run(act)
