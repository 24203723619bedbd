"""Updates of weights in the loop of an engine: no answer of mixed versions, and nothing cached of old weights."""

import asyncio
import random
from typing import Any

import pytest

from orca_jax.link.client import EngineClient
from orca_jax.link.errors import Unavailable
from orca_jax.link.wire import EngineAnswer, EngineCall, FromFrontEnd, ReadWeights, Ready
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams, StructuredOutput
from tests.rollouts.toy_weights import Front, ShiftedToy, expected, run_front

PROMPT = list(range(1, 13))


@pytest.mark.parametrize(
    ("scheduler", "number"), [("chunked", 100), ("orca", 20), ("request_level", 20)]
)
def test_updates_under_load(scheduler: Any, number: int) -> None:
    """Each answer is that of the weights of its version, for all candidates of a call and for prefixes in the cache."""
    toy = ShiftedToy(scheduler=scheduler, max_model_len=64)
    shift_of = {0: 0}

    async def act(front: Front) -> list[int]:
        draw, versions = random.Random(0), list[int]()
        is_over = False

        async def user(name: int) -> None:
            while not is_over:
                prompt = [*PROMPT[: draw.randint(1, 12)], name]
                count, n = draw.randint(1, 9), draw.randint(1, 3)
                params = SamplingParams(max_tokens=count, temperature=0, n=n, ignore_eos=True)
                version, texts, reasons = await front.answer(prompt, params)
                assert reasons == ["length"] * n
                for text in texts:
                    assert text == expected(prompt, count, shift_of[version])
                versions.append(version)

        users = [asyncio.create_task(user(name)) for name in range(4)]
        for version in range(1, number + 1):
            shift_of[version] = draw.randint(1, 99)
            assert await front.client.update_weights(str(shift_of[version])) == version
        is_over = True
        await asyncio.gather(*users)
        return versions

    versions: list[int] = run_front(toy, act)
    assert len(set(versions)) > number // 2, "answers were made between the updates"
    assert toy.engine.weight_version == number
    toy.engine.pool.check_integrity()


def test_the_prefix_cache_is_emptied() -> None:
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        params, pool = SamplingParams(max_tokens=2, temperature=0), toy.engine.pool
        for _ in range(2):
            await front.answer(PROMPT, params)
        assert pool.num_cache_hits == 11
        await front.client.update_weights("3")
        version, (text,), _ = await front.answer(PROMPT, params)
        assert (version, text, pool.num_cache_hits) == (1, expected(PROMPT, 2, 3), 11)
        await front.answer(PROMPT, params)
        assert pool.num_cache_hits == 22, "pages of the new weights are found"

    run_front(toy, act)
    assert (toy.engine.pool.kv.num_free_blocks,) == toy.engine.pool.kv.num_blocks


def test_open_requests_are_aborted_on_request() -> None:
    toy = ShiftedToy(0.003, max_model_len=1024)

    async def act(front: Front) -> None:
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        structured = SamplingParams(
            max_tokens=1000, structured=StructuredOutput("regex", "[ab]{900}")
        )
        calls = [asyncio.create_task(front.answer(PROMPT, each)) for each in (params, structured)]
        await asyncio.sleep(0.01)
        assert await front.client.update_weights("5", 70, aborts=True) == 70
        for version, (text,), reasons in await asyncio.gather(*calls):
            assert version == 0 and reasons == ["abort"] and len(text) < 1000
        assert (await front.answer([1], SamplingParams(max_tokens=3, temperature=0)))[0] == 70

    run_front(toy, act)
    assert toy.engine.weight_version == 70


def test_requests_that_arrive_during_an_update_wait_and_can_be_aborted() -> None:
    toy = ShiftedToy(0.003, max_model_len=1024)

    async def act(front: Front) -> None:
        long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        first = asyncio.create_task(front.answer(PROMPT, long))
        await asyncio.sleep(0)
        update = asyncio.create_task(front.client.update_weights("9"))
        while toy.prepared != ["9"] or toy.engine.num_running == 0:
            await asyncio.sleep(0)
        while not front.thread._engine_loop._updates.is_due:
            assert not update.done()
            await asyncio.sleep(0)
        later = asyncio.create_task(
            front.answer([4, 5], SamplingParams(max_tokens=3, temperature=0))
        )
        dropped = asyncio.create_task(
            front.answer([4, 5], SamplingParams(max_tokens=3, temperature=0))
        )
        await asyncio.sleep(0)
        dropped.cancel()
        assert (await first)[:2] == (0, [expected(PROMPT, 100, 0)])
        assert await update == 1
        assert (await later)[:2] == (1, [expected([4, 5], 3, 9)])

    run_front(toy, act)
    assert toy.engine.stats.waiting == 0


def test_a_refused_update_changes_nothing_and_the_next_one_is_read() -> None:
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        updates = [front.client.update_weights(source) for source in ("bad", "2", "crash", "4")]
        bad, two, crash, four = await asyncio.gather(*updates, return_exceptions=True)
        assert isinstance(bad, RequestError) and (bad.message, bad.param) == (
            "these weights are bad",
            "model",
        )
        assert (two, four) == (1, 2)
        assert isinstance(crash, RequestError) or crash == 2
        assert toy.prepared == ["bad", "2", "crash", "4"]

    def prepare(source: str, plain: Any = toy.prepare) -> Any:
        put = plain(source)
        if source == "crash":
            raise OSError("the disk is gone")
        return put

    toy.prepare = prepare  # type: ignore[method-assign]
    object.__setattr__(toy.built, "prepare_update", prepare)
    run_front(toy, act)
    assert toy.shift == 4


def test_an_update_ends_with_the_engine() -> None:
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        update = asyncio.create_task(front.client.update_weights("1"))
        await asyncio.sleep(0)
        front.client.lose("dead")
        with pytest.raises(Unavailable):
            await update
        with pytest.raises(Unavailable):
            await front.client.update_weights("2")

    run_front(toy, act)


def test_an_answer_after_the_end_of_an_update_is_ignored() -> None:
    """A server that stops has ended its updates, while the engine still reads the weights of one."""

    class Silent:
        """A link to an engine without answers of its own."""

        def send(self, message: FromFrontEnd) -> None:
            sent.append(message)

    sent: list[FromFrontEnd] = []

    async def act() -> None:
        client = EngineClient(ServerConfig())
        client.attach(Silent())
        client.serve(Ready("", "byte", vocab_size=257, max_model_len=64, n_slots=1000, num_rows=2))
        update = asyncio.ensure_future(client.update_weights("1"))
        while not sent:
            await asyncio.sleep(0)
        client.stop()
        with pytest.raises(Unavailable):
            await update
        client.take_message(EngineAnswer(0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent == [EngineCall(0, ReadWeights("1"))], "no weights are to be replaced"

    asyncio.run(act())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_an_update_goes_on_while_the_server_drains_or_without_its_caller(
    is_cancelled: bool,
) -> None:
    """The engine has read the weights, and begins with no other ones before these are in use."""
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        update = asyncio.create_task(front.client.update_weights("9"))
        while toy.prepared != ["9"]:
            await asyncio.sleep(0)
        if is_cancelled:
            update.cancel()
            assert await front.client.update_weights("4") == 2
        else:
            front.client.drain()
            assert await update == 1

    run_front(toy, act)
    assert toy.engine.weight_version == 1 + is_cancelled
