"""Calls that change the adapters of the engine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orca_jax.link.adapters import MOST_ENDS, ServedAdapters
from orca_jax.link.calls import EngineCalls
from orca_jax.link.client import EngineClient
from orca_jax.link.errors import Unavailable
from orca_jax.link.wire import EngineAnswer, EngineCall, FromFrontEnd, LoadAdapter, Ready
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import RequestError

Sent = list[EngineCall]


def run(act: Callable[[EngineCalls, ServedAdapters, Sent], Awaitable[None]]) -> None:
    async def with_calls() -> None:
        sent: Sent = []
        calls = EngineCalls(sent.append)
        await act(calls, ServedAdapters(calls), sent)

    asyncio.run(asyncio.wait_for(with_calls(), 60))


async def turns() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def started[T](change: Awaitable[T]) -> asyncio.Task[T]:
    task = asyncio.ensure_future(change)
    await turns()
    return task  # type: ignore[return-value]


def test_changes_wait_for_their_own_answers() -> None:
    async def act(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
        first, second = (
            await started(adapters.load("a", "x")),
            await started(adapters.load("b", "y")),
        )
        calls.end(EngineAnswer(sent[1].number, "no", "lora_path"))
        with pytest.raises(RequestError, match="no") as error:
            await second
        assert error.value.param == "lora_path" and not first.done()
        calls.end(EngineAnswer(sent[0].number))
        await first
        assert adapters.loaded == {"a": "x"}
        gone = await started(adapters.unload("a"))
        calls.end(EngineAnswer(sent[2].number))
        await gone
        assert adapters.loaded == {}

    run(act)


def test_a_change_counts_although_its_caller_has_gone() -> None:
    """The next caller would load the adapter again otherwise, and the engine would refuse it."""

    async def act(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
        changes: list[tuple[Awaitable[None], dict[str, str]]] = [
            (adapters.load("a", "x"), {"a": "x"}),
            (adapters.unload("a"), {}),
        ]
        for change, loaded in changes:
            task = await started(change)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            calls.end(EngineAnswer(sent[-1].number))
            await turns()
            assert adapters.loaded == loaded

    run(act)


def test_a_lost_engine_ends_all_changes() -> None:
    async def act(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
        task = await started(adapters.load("a", "x"))
        calls.fail(Unavailable("the engine has ended"))
        with pytest.raises(Unavailable):
            await task
        calls.end(EngineAnswer(sent[0].number))
        await turns()
        assert adapters.loaded == {}

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


async def loaded_both(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
    for name in "ab":
        task = await started(adapters.load(name, name.upper()))
        calls.end(EngineAnswer(sent[-1].number))
        await task
    sent.clear()


def test_a_new_engine_gets_the_adapters_one_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
        first, sent = sent, []
        await loaded_both(calls, adapters, first)
        again = await started(adapters.load_again(sent.append, asyncio.Event()))
        for name, error in (("a", None), ("b", "gone")):
            assert sent[-1].change == LoadAdapter(name, name.upper())
            calls.end(EngineAnswer(sent[-1].number, error))
            await turns()
        assert await again is True and len(sent) == 2
        assert (adapters.loaded, adapters.lost) == ({"a": "A"}, {"b": "gone"})
        assert (
            "the adapter b is not loaded any more: gone; requests for it are refused" in caplog.text
        )
        adapters.lost["a"] = "as if"
        await loaded_both(calls, adapters, first)
        assert adapters.lost == {}, "a call may load it again"

    run(act)


def test_an_adapter_that_ends_two_engines_is_dropped() -> None:
    async def act(calls: EngineCalls, adapters: ServedAdapters, sent: Sent) -> None:
        await loaded_both(calls, adapters, sent)
        for turn in range(MOST_ENDS):
            assert (adapters.loaded, adapters.lost) == ({"a": "A", "b": "B"}, {}), turn
            ended = asyncio.Event()
            again = await started(adapters.load_again(sent.append, ended))
            ended.set()
            assert await again is False
        assert adapters.loaded == {"b": "B"} and adapters.lost == {
            "a": "2 engines ended while they loaded it again"
        }
        assert [call.change for call in sent] == [LoadAdapter("a", "A")] * 2

    run(act)
