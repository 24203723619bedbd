"""Pauses of an engine in the modes of vLLM: what becomes of open requests, and of those that come later."""

import asyncio
import random

import pytest

from orca_jax.link.wire import PauseMode, Submit
from orca_jax.values.request import SamplingParams
from tests.rollouts.toy_weights import Front, ShiftedToy, expected, run_front

PROMPT = list(range(1, 13))
STEP = 0.003  # seconds of an iteration
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


async def begun(toy: ShiftedToy, front: Front) -> asyncio.Task:
    """A request with some of its tokens."""
    answer = asyncio.create_task(front.answer(PROMPT, LONG))
    before = toy.engine.stats.iterations
    while toy.engine.stats.iterations < before + 5:
        await asyncio.sleep(STEP)
    return answer


async def turns() -> None:
    """Time for many iterations."""
    for _ in range(20):
        await asyncio.sleep(STEP)


def test_kept_requests_go_on_where_they_were() -> None:
    toy = ShiftedToy(STEP, max_model_len=1024)

    async def act(front: Front) -> None:
        first = await begun(toy, front)
        await front.client.changes.pause("keep")
        assert front.client.changes.is_paused
        before = toy.engine.stats.iterations
        later = asyncio.create_task(front.answer([4, 5], SHORT))
        await turns()
        assert toy.engine.stats.iterations == before
        assert not first.done() and not later.done()
        await front.client.changes.resume()
        assert not front.client.changes.is_paused
        assert (await first)[:2] == (0, [expected(PROMPT, 60, 0)])
        assert (await later)[:2] == (0, [expected([4, 5], 3, 0)])

    run_front(toy, act)


@pytest.mark.parametrize("scheduler", ["chunked", "orca", "request_level"])
def test_kept_requests_go_on_with_new_weights(scheduler: str) -> None:
    """Their tokens before and after the update are those of both weights, and each change is told."""
    settings = {} if scheduler == "chunked" else {"scheduler": scheduler, "n_slots": 512}
    toy = ShiftedToy(STEP, max_model_len=256, **settings)

    async def act(front: Front) -> None:
        async with front.client.open([Submit("kept", PROMPT, LONG)]) as call:
            while toy.engine.stats.iterations < 8:
                await asyncio.sleep(STEP)
            await front.client.changes.pause("keep")
            assert await front.client.update_weights("3") == 1
            later = asyncio.create_task(front.answer([4, 5], SHORT))
            await turns()
            assert await front.client.update_weights("5", 7) == 7
            await front.client.changes.resume()
            tokens: list[int] = []
            versions: dict[int | None, int] = {}
            is_open = True
            while is_open:
                for update in await call.receive():
                    versions.setdefault(update.weight_version, len(tokens))
                    tokens += update.new_ids
                    is_open = update.finish_reason is None
        assert call.weight_version == 0 and list(versions) == [None, 7]
        first = versions[7]
        old = expected(PROMPT, first, 0)
        assert 0 < first < 60 and tokens == old + expected(PROMPT + old, 60 - first, 5)
        assert (await later)[:2] == (7, [expected([4, 5], 3, 5)])

    run_front(toy, act)
    toy.engine.pool.check_integrity()
    assert not toy.engine.has_work


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_hundred_updates_under_load(mode: PauseMode) -> None:
    """Each answer has the tokens of one version, unless a pause has kept it: then those of each in turn."""
    toy = ShiftedToy(max_model_len=64)
    mixed = 0

    async def act(front: Front) -> None:
        draw = random.Random(1)
        is_over = False

        async def user(name: int) -> None:
            nonlocal mixed
            while not is_over:
                prompt = [*PROMPT[: draw.randint(1, 12)], name]
                count = draw.randint(1, 30)
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                tokens, versions = await answer_with_versions(front, prompt, params)
                wanted: list[int] = []
                for at, version in enumerate(versions):
                    wanted += expected(prompt + wanted, 1, version % 250)
                    assert tokens[at] == wanted[-1], f"token {at} is not of version {version}"
                assert versions == sorted(versions)
                assert len(tokens) == count or mode == "abort"
                mixed += len(set(versions)) > 1

        users = [asyncio.create_task(user(name)) for name in range(4)]
        for number in range(1, 101):
            await front.client.changes.pause(mode)
            assert await front.client.update_weights(str(number % 250)) == number
            await front.client.changes.resume()
            await asyncio.sleep(STEP)
        is_over = True
        await asyncio.gather(*users)

    run_front(toy, act)
    assert (mixed > 0) == (mode == "keep")
    toy.engine.pool.check_integrity()
    assert not toy.engine.has_work and toy.engine.weight_version == 100


async def answer_with_versions(
    front: Front, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[int]]:
    """The tokens of a request, and the version of the weights of each."""
    tokens: list[int] = []
    versions: list[int] = []
    name = front.client.new_request_id()
    async with front.client.open([Submit(name, prompt, params)]) as call:
        reason = None
        while reason is None:
            for update in await call.receive():
                version = update.weight_version
                if version is None:
                    version = call.weight_version
                tokens += update.new_ids
                versions += [version] * len(update.new_ids)
                reason = update.finish_reason
    return tokens, versions


def test_a_pause_begins_when_open_requests_have_finished() -> None:
    toy = ShiftedToy(STEP, max_model_len=1024)

    async def act(front: Front) -> None:
        first = await begun(toy, front)
        pause = asyncio.create_task(front.client.changes.pause("wait"))
        await asyncio.sleep(STEP)
        later = asyncio.create_task(front.answer([4, 5], SHORT))
        dropped = asyncio.create_task(front.answer([6], SHORT))
        assert (await first)[:2] == (0, [expected(PROMPT, 60, 0)])
        await pause
        dropped.cancel()
        await turns()
        assert not later.done() and not toy.engine.has_work
        assert await front.client.update_weights("9") == 1
        assert not later.done()
        await front.client.changes.resume()
        assert (await later)[:2] == (1, [expected([4, 5], 3, 9)])

    run_front(toy, act)
    assert toy.engine.stats.waiting == 0


def test_a_pause_may_abort_open_requests() -> None:
    toy = ShiftedToy(STEP, max_model_len=1024)

    async def act(front: Front) -> None:
        first = await begun(toy, front)
        await front.client.changes.pause()
        _, (text,), reasons = await first
        assert reasons == ["abort"] and len(text) < 60
        later = asyncio.create_task(front.answer([4, 5], SHORT))
        await turns()
        assert not later.done()
        await front.client.changes.resume()
        assert (await later)[1] == [expected([4, 5], 3, 0)]

    run_front(toy, act)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_the_prefix_cache_is_emptied_on_request(clear_cache: bool) -> None:
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        await front.answer(PROMPT, SHORT)
        await front.client.changes.pause("wait", clear_cache=clear_cache)
        await front.client.changes.resume()
        await front.answer(PROMPT, SHORT)
        assert toy.engine.pool.num_cache_hits == (0 if clear_cache else 11)

    run_front(toy, act)


def test_random_pauses_lose_no_request() -> None:
    """Answers are whole unless they were aborted, and the last resume leaves nothing behind."""
    toy = ShiftedToy(max_model_len=64)

    async def act(front: Front) -> None:
        draw = random.Random(0)
        modes: list[PauseMode] = ["abort", "wait", "keep"]
        is_over = False
        aborted = 0

        async def user(name: int) -> None:
            nonlocal aborted
            while not is_over:
                prompt = [*PROMPT[: draw.randint(1, 12)], name]
                count = draw.randint(1, 20)
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                _, (text,), (reason,) = await front.answer(prompt, params)
                whole = expected(prompt, count, 0)
                assert text == whole[: len(text)]
                aborted += reason == "abort"
                assert reason == "abort" or text == whole

        users = [asyncio.create_task(user(name)) for name in range(4)]
        for _ in range(60):
            await front.client.changes.pause(draw.choice(modes))
            if draw.random() < 0.3:
                await front.client.changes.pause(draw.choice(modes))
            await asyncio.sleep(0)
            await front.client.changes.resume()
            await asyncio.sleep(STEP)
        is_over = True
        await asyncio.gather(*users)
        assert aborted > 0

    run_front(toy, act)
    toy.engine.pool.check_integrity()
    assert not toy.engine.has_work
