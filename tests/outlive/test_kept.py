"""The front end between two engines: what it submits again, to whom it gives an error, and what it refuses."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from orca_jax.link.client import EngineClient, OpenCall
from orca_jax.link.errors import Unavailable
from orca_jax.link.restarts.kept import MOST_LOSSES
from orca_jax.link.wire import EngineAnswer, EngineCall, ReplaceWeights, Submit, Updates
from orca_jax.server_config import ServerConfig
from orca_jax.values.request import RequestMetrics, RequestUpdate, SamplingParams
from orca_jax.values.resumed import Resumed
from tests.link.test_admission import READY, FakeLink, aborted, asked, serving, submitted, update

pytestmark = pytest.mark.anyio
TIMES = RequestMetrics(1.0, 2.0, 3.0, 3.0)


def kept(**settings: Any) -> tuple[EngineClient, FakeLink]:
    return serving(restart_engine=True, **settings)


def first(request_id: str, *ids: int) -> Updates:
    """The update with the first ids."""
    return Updates([RequestUpdate(request_id, ids, metrics=TIMES)], running=1, waiting=0)


def following(client: EngineClient) -> FakeLink:
    """End the engine, and let another one serve."""
    client.lose("dead")
    assert client.state == "restarting"
    link = FakeLink()
    client.attach(link)
    assert client.state == "restarting" and not link.sent
    client.serve(READY)
    return link


def sent(link: FakeLink) -> list[Submit]:
    return [message for message in link.sent if isinstance(message, Submit)]


async def failure(call: OpenCall) -> Exception:
    with pytest.raises(Unavailable) as caught:
        while await call.receive():
            pass
    return caught.value


async def test_open_requests_are_submitted_again_in_their_order() -> None:
    """With their ids, their seeds, and their calls together; those that have ended are not."""
    client, link = kept()
    calls = [client.open(asked(client, *lengths)) for lengths in ((2, 3), (4,), (5, 1))]
    begun = sent(link)
    assert all(request.params.seed is not None for request in begun)
    client.take_message(first("r0", 5, 6))
    client.take_message(update("r0", ids=(7,)))
    client.take_message(update("r4", "stop"))
    again = sent(following(client))
    assert [request.request_id for request in again] == ["r0", "r1", "r2", "r3"]
    assert [request.has_more for request in again] == [True, False, False, False]
    assert again[0].resumed == Resumed((5, 6, 7), TIMES) and again[1].resumed is None
    for one, other in zip(begun, again, strict=False):
        same = msgspec.structs.replace(other, resumed=None, has_more=one.has_more)
        assert same == one
    found = await calls[0].receive()
    assert [token for each in found for token in each.new_ids] == [5, 6, 7]  # type: ignore[union-attr]
    for call in calls:
        await call.__aexit__(None, None, None)
    assert client.num_calls == 0


async def test_seeds_are_those_that_the_engine_would_draw() -> None:
    client, link = kept()
    async with client.open(asked(client, 1)):
        client.open([Submit("mine", [1], SamplingParams(seed=3))])
        client.open(asked(client, 1))
        seeds = [request.params.seed for request in sent(link)]
    import random

    drawn = random.Random(0)
    expected = [drawn.getrandbits(63) for _ in range(3)]
    assert seeds == [expected[0], 3, expected[2]]


async def test_an_abort_during_the_pause_is_not_submitted() -> None:
    client, _ = kept()
    call = client.open(asked(client, 2, 2))
    client.lose("dead")
    client.abort("r0")
    link = FakeLink()
    client.attach(link)
    client.abort("r1")
    client.serve(READY)
    assert submitted(link) == []
    await call.__aexit__(None, None, None)
    assert client.idle.is_set()


async def test_a_request_that_may_end_each_engine_is_given_up() -> None:
    """Its call gets an error when it has lost several engines in a row; ids begin the count anew."""
    client, _ = kept()
    calls = [client.open(asked(client, 2)) for _ in range(2)]
    for _ in range(MOST_LOSSES):
        link = following(client)
        assert submitted(link) == ["r0", "r1"]
    client.take_message(first("r1", 5))
    link = following(client)
    assert submitted(link) == ["r1"] and aborted(link) == ["r0"]
    assert "ended" in str(await failure(calls[0]))


async def test_new_calls_are_refused_during_the_pause() -> None:
    client, _ = kept()
    client.lose("hung")
    client.lose("dead")
    assert client.state == "restarting"
    with pytest.raises(Unavailable, match="started again"):
        client.open(asked(client, 1))


async def test_no_engine_any_more_ends_all_calls() -> None:
    client, _ = kept()
    call = client.open(asked(client, 1))
    client.lose("dead")
    client.give_up(Unavailable("it failed too often"))
    assert client.state == "dead" and "ended" in str(await failure(call))


async def test_answers_of_replaced_weights_end_with_their_engine() -> None:
    """The next engine has the weights of the model: an answer never has tokens of two versions."""
    client, link = kept()
    task = asyncio.create_task(client.update_weights("somewhere"))
    for _ in range(2):
        await asyncio.sleep(0.01)
        (*_, call) = [message for message in link.sent if isinstance(message, EngineCall)]
        client.take_message(EngineAnswer(call.number, version=1))
    assert isinstance(call.change, ReplaceWeights) and await task == 1
    open_call = client.open(asked(client, 1))
    assert submitted(following(client)) == []
    assert "ended" in str(await failure(open_call))
    client.open(asked(client, 1))
    assert submitted(following(client)) == ["r1"]


async def test_an_adapter_that_was_replaced_ends_its_requests() -> None:
    client, _ = kept()
    client.adapters.loaded.update(one="a", other="b")
    requests = [Submit(name, [1], SamplingParams(), adapter=name) for name in ("one", "other")]
    calls = [client.open([request]) for request in requests]
    client.adapters.loaded["one"] = "c"
    assert submitted(following(client)) == ["other"]
    await failure(calls[0])


async def test_a_server_that_drains_goes_on_too() -> None:
    client, _ = kept()
    client.open(asked(client, 1))
    client.drain()
    client.lose("dead")
    link = FakeLink()
    client.attach(link)
    client.serve(READY)
    assert client.state == "draining" and submitted(link) == ["r0"]
    client.stop()
    client.lose("dead")
    assert client.state == "stopping"


async def test_calls_end_with_their_engine_without_the_setting() -> None:
    client, link = serving()
    call = client.open(asked(client, 1))
    assert sent(link)[0].params == SamplingParams(4)
    client.lose("dead")
    assert client.state == "dead" and "ended" in str(await failure(call))


async def test_deadlines_go_on_during_the_pause() -> None:
    client = EngineClient(ServerConfig(restart_engine=True, request_timeout=0.05))
    client.attach(FakeLink())
    client.serve(READY)
    request = replace(SamplingParams(4), temperature=0.0)
    call = client.open([Submit("late", [1], request)])
    client.lose("dead")
    with pytest.raises(Exception, match="longer than its timeout"):
        await call.receive()
