"""`AsyncLLM` on the toy model: streams of several tasks in one engine process, aborts, errors and the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orca_jax import AsyncLLM, SamplingParams
from orca_jax.link.client import EngineClient
from orca_jax.link.wire import EngineAnswer, EngineCall, FromFrontEnd, LoadAdapter, Ready
from orca_jax.llm.outputs import RequestOutput
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError, EngineError, RequestError
from orca_jax.values.lora_request import LoRARequest
from orca_jax.values.step import SpannedPrompt, VectorSpan
from tests.sim.oracle import toy_generate

SETTINGS: dict[str, Any] = {
    "model": "preset:toy",
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "page_size": 16,
}


def oracle(prompt: str, params: SamplingParams) -> tuple[int, ...]:
    return tuple(toy_generate(list(prompt.encode()), params, vocab_size=257, eos_token_ids=(256,)))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


async def all_of(*outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return await asyncio.gather(*(last(one) for one in outputs))


def test_tasks_share_the_engine() -> None:
    async def run() -> None:
        greedy = SamplingParams(max_tokens=30, temperature=0)
        async with AsyncLLM(**SETTINGS) as llm:
            texts = ["a", "bb", "ccc", "d" * 50]
            outputs = await all_of(*(llm.generate(text, greedy) for text in texts))
            assert [output.outputs[0].token_ids for output in outputs] == [
                oracle(text, greedy) for text in texts
            ]
            assert [output.prompt for output in outputs] == texts
            long = "e" * 40
            await last(llm.generate(long, greedy))
            assert (await last(llm.generate(long, greedy))).num_cached_tokens >= 32
            assert await llm.reset_prefix_cache() is True
            assert (await last(llm.generate(long, greedy))).num_cached_tokens == 0
            named = await all_of(
                llm.generate("a", greedy, "mine"), llm.generate("bb", greedy, request_id="mine")
            )
            assert [output.request_id for output in named] == ["mine", "mine"], (
                "a caller's ids may be equal"
            )
            assert [one.outputs[0].token_ids for one in named] == [
                one.outputs[0].token_ids for one in outputs[:2]
            ]
            forms = {"prompt": "bb"}, {"prompt_token_ids": list(b"bb")}
            same = await all_of(*(llm.generate(form, greedy) for form in forms))
            assert {output.outputs[0].token_ids for output in same} == {
                outputs[1].outputs[0].token_ids
            }

            pair = SamplingParams(max_tokens=12, n=2, seed=5, logprobs=0)
            (output,) = await all_of(llm.generate(list(b"abc"), pair))
            alone = [SamplingParams(max_tokens=12, seed=5 + index, logprobs=0) for index in (0, 1)]
            assert [one.token_ids for one in output.outputs] == [
                oracle("abc", params) for params in alone
            ]
            assert all(
                one.logprobs is not None and len(one.logprobs) == 12 for one in output.outputs
            )

            whole = outputs[0].outputs[0].text
            cut = SamplingParams(max_tokens=30, temperature=0, stop=(whole[4],))
            (output,) = await all_of(llm.generate("a", cut))
            assert (
                output.outputs[0].text == whole[: whole.index(whole[4])]
                and output.outputs[0].finish_reason == "stop"
            )

            (output,) = await all_of(llm.chat([{"role": "user", "content": "Hello"}], greedy))
            assert output.prompt is not None and "Hello" in output.prompt
            assert output.outputs[0].token_ids == oracle(output.prompt, greedy)

    asyncio.run(run())


def test_a_closed_stream_is_aborted_and_errors_disturb_nothing() -> None:
    async def run() -> None:
        async with AsyncLLM(**SETTINGS) as llm:
            endless = SamplingParams(max_tokens=4000, ignore_eos=True)
            async with contextlib.aclosing(llm.generate("a", endless)) as outputs:
                first = await anext(outputs)
                assert not first.finished and first.outputs[0].finish_reason is None
                for prompt, fields, param in (
                    ([1, 999], {}, "prompt"),
                    (["x"], {}, "prompt"),
                    (5, {}, "prompt"),
                    ({"text": "x"}, {}, "prompt"),
                    ("a", {"stop_token_ids": [999]}, "stop_token_ids"),
                    ("a", {"bad_words": [""]}, "bad_words"),
                ):
                    with pytest.raises(RequestError) as caught:
                        await last(llm.generate(prompt, SamplingParams(**fields)))  # type: ignore[arg-type]
                    assert caught.value.param is not None and param in caught.value.param
                spanned = SpannedPrompt((1, 2), (VectorSpan(0, 1, bytes(32), "image-1"),))
                with pytest.raises(RequestError, match="of the family toy read ids alone"):
                    await last(llm.generate(spanned))
                with pytest.raises(RequestError, match="priority must be 0"):
                    await last(llm.generate("a", priority=1))
                assert not (await anext(outputs)).finished
            client = llm._client
            assert client is not None
            await client.idle.wait()
            for _ in range(200):
                await last(llm.generate("b", SamplingParams(max_tokens=1)))
                if not client.running:
                    break
            assert (client.running, client.num_calls) == (0, 0)

    asyncio.run(run())


def test_a_pause_lets_requests_wait() -> None:
    async def run() -> None:
        greedy = SamplingParams(max_tokens=4, temperature=0)
        async with AsyncLLM(**SETTINGS) as llm:
            with pytest.raises(ConfigError, match="mode must be one of abort, wait, keep"):
                await llm.pause_generation(mode="stop")  # type: ignore[arg-type]
            await llm.pause_generation(mode="wait")
            assert await llm.is_paused()
            later = asyncio.create_task(last(llm.generate("a", greedy)))
            done, _ = await asyncio.wait([later], timeout=0.1)
            assert not done
            await llm.resume_generation()
            assert (await later).outputs[0].token_ids == oracle("a", greedy)
            assert not await llm.is_paused()

    asyncio.run(run())


def test_a_toy_cannot_sleep() -> None:
    async def run() -> None:
        async with AsyncLLM(**SETTINGS) as llm:
            with pytest.raises(ConfigError, match="mode must be abort or wait"):
                await llm.sleep(mode="keep")
            with pytest.raises(ConfigError, match="tags must be of weights, kv_cache, got 'all'"):
                await llm.wake_up(["all"])  # type: ignore[list-item]
            with pytest.raises(ConfigError, match="cannot sleep"):
                await llm.sleep()
            assert not await llm.is_sleeping() and not await llm.is_paused()

    asyncio.run(run())


def test_settings_and_states_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"AsyncLLM.*did you mean max_num_seqs"):
        AsyncLLM(max_num_seq=3)

    async def run() -> None:
        llm = AsyncLLM(**SETTINGS)
        with pytest.raises(EngineError, match="not open: use it as"):
            await last(llm.generate("a"))
        async with llm:
            outputs = llm.generate("a", SamplingParams(max_tokens=4000, ignore_eos=True))
            await anext(outputs)
        with pytest.raises(EngineError):
            await last(outputs)
        with pytest.raises(ConfigError, match="/nowhere is not a directory"):
            async with AsyncLLM(model="/nowhere"):
                pass

    asyncio.run(run())


def test_a_cancelled_first_use_of_an_adapter_spoils_no_later_one() -> None:
    """The engine loads it all the same, and would refuse to load it again."""

    class Engine:
        """A link to an engine without answers of its own."""

        def __init__(self) -> None:
            self.sent: list[FromFrontEnd] = []

        def send(self, message: FromFrontEnd) -> None:
            self.sent.append(message)

    async def run() -> None:
        llm, client, engine = (
            AsyncLLM(**SETTINGS, enable_lora=True),
            EngineClient(ServerConfig()),
            Engine(),
        )
        client.attach(engine)
        client.serve(Ready("", "byte", vocab_size=257, max_model_len=64, n_slots=1000, num_rows=2))
        first = asyncio.create_task(llm._adapter(client, LoRARequest("a", "x")))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        uses = [asyncio.create_task(llm._adapter(client, LoRARequest("a", path))) for path in "xy"]
        await asyncio.sleep(0.01)
        assert engine.sent == [EngineCall(0, LoadAdapter("a", "x"))]
        client.take_message(EngineAnswer(0))
        assert await uses[0] == "a" == await llm._adapter(client, LoRARequest("a", "x"))
        with pytest.raises(RequestError, match="stands for x, not for y"):
            await uses[1]
        refused = asyncio.create_task(llm._adapter(client, LoRARequest("b", "z")))
        await asyncio.sleep(0.01)
        client.take_message(EngineAnswer(1, "no such directory", "lora_path"))
        with pytest.raises(RequestError, match="no such directory"):
            await refused

    asyncio.run(run())
