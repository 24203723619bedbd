"""The sampler for Tunix's experimental workers, on a recorded protocol: weights, errors, and cancelled callers."""

import asyncio
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from orca_jax.llm.new_weights import save_tree
from orca_jax.llm.tunix_sampler import DATATYPES, SAMPLER, OrcaSampler
from orca_jax.model.trees.memory import nested
from orca_jax.values.errors import CheckpointError, ConfigError, EngineError
from orca_jax.values.request import SamplingParams
from tests.rollouts import sampler_contract as contract
from tests.rollouts.test_llm import GPT2, tree
from tests.rollouts.test_tunix import FakeTokenizer
from tests.sim.oracle import toy_generate, toy_score


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the recorded classes, in place of Tunix's."""
    for name in (SAMPLER, DATATYPES):
        module = types.ModuleType(name)
        vars(module).update(vars(contract))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def sampler() -> Iterator[OrcaSampler]:
    made = OrcaSampler(
        "one",
        "preset:toy",
        trainer_tokenizer=FakeTokenizer(),
        logprobs_mode="raw_logprobs",
        max_model_len=4096,
        max_num_seqs=64,
        page_size=16,
    )
    made.initialize()
    yield made
    asyncio.run(made.stop())
    assert made._made is not None and not made._made.llm._turns.open


def request(prompt: Any, **params: Any) -> contract.SamplingRequest:
    options = {"max_tokens": 6, "temperature": 0, **params}
    return contract.SamplingRequest(
        prompt=prompt, request_id=str(prompt), sampling_params=contract.SamplingParams(**options)
    )


def tokens_of(ids: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0, stop_token_ids=(256,))
    return toy_generate(ids, params, vocab_size=257)


def test_it_has_the_methods_of_the_protocol(sampler: OrcaSampler) -> None:
    assert isinstance(sampler, contract.Sampler)
    for name, wanted in contract.METHODS.items():
        method = getattr(OrcaSampler, name)
        found = inspect.signature(method).parameters
        positional = [key for key in found if found[key].kind.name == "POSITIONAL_OR_KEYWORD"][1:]
        assert positional == [key for key in wanted if key != "kwargs"], name
        takes_any = any(each.kind.name == "VAR_KEYWORD" for each in found.values())
        assert takes_any == ("kwargs" in wanted), name
        assert inspect.iscoroutinefunction(method) != (name in contract.PLAIN), name


def test_answers_of_texts_ids_and_wrong_requests(sampler: OrcaSampler) -> None:
    requests = [
        request("ab", return_logprobs=True),
        request(np.array([5, 6])),
        request("c", return_logits=True),
        request([7], top_k=5),
        request([300]),
    ]
    good, ids, *wrong = asyncio.run(sampler.sample(requests))
    assert good.prompt_token_ids.tolist() == [2, 97, 98] and good.request_id == "ab"
    expected = tokens_of([2, 97, 98], 6)
    assert good.token_ids.tolist() == expected and good.text == " ".join(map(str, expected))
    scores = [one.logprob for one in toy_score([2, 97, 98, *expected], 0, vocab_size=257)]
    np.testing.assert_allclose(good.logprobs, scores[-len(expected) :], rtol=1e-6)
    assert good.metadata == {"policy_version": 0} and good.finish_reason == "length"
    assert ids.token_ids.tolist() == tokens_of([5, 6], 6) and ids.logprobs is None
    messages = ["return_logits is not supported", "top_k 5 leaves tokens out", "prompt"]
    for answer, words in zip(wrong, messages, strict=True):
        assert answer.finish_reason == "error" and words in answer.error.message
        assert answer.error.error_type == "RequestError"
    alone = asyncio.run(sampler.sample(request("ab")))
    assert alone.token_ids.tolist() == expected


def test_64_callers_share_iterations_and_cancelled_ones_leave(sampler: OrcaSampler) -> None:
    assert sampler._made is not None
    engine = sampler._made.llm.engine

    async def run() -> None:
        short = [
            asyncio.create_task(sampler.sample(request([index], max_tokens=40)))
            for index in range(32)
        ]
        long = [
            asyncio.create_task(sampler.sample([request([index], max_tokens=3000)]))
            for index in range(32)
        ]
        answers = await asyncio.gather(*short)
        assert [each.token_ids.tolist() for each in answers] == [
            tokens_of([index], 40) for index in range(32)
        ]
        for task in long:
            task.cancel()
        ended = await asyncio.gather(*long, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        while engine.has_work:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    stats = engine.stats
    assert stats.scheduled_tokens < 32 * 2000, "the cancelled requests would have had more"
    assert stats.scheduled_requests / stats.iterations > 8


def test_pauses_and_load(sampler: OrcaSampler) -> None:
    async def run() -> None:
        await sampler.pause()
        waits = asyncio.create_task(sampler.sample(request("ab")))
        await asyncio.sleep(0.05)
        assert not waits.done()
        load = await sampler.get_load_info()
        assert (load.num_requests_waiting, load.num_requests_running) == (0, 0)
        assert load.kv_cache_usage_perc == 0
        await sampler.resume()
        assert (await waits).token_ids.tolist() == tokens_of([2, 97, 98], 6)
        assert await sampler.migrate_kv_cache("one", "two", [1]) is False
        assert await sampler.get_transfer_status("1") == "SUCCESS"
        assert await sampler.bind_weight_sync() is None

    asyncio.run(run())


@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
def test_a_round_of_weights(program_cache: str, tmp_path: Path) -> None:
    """Weights of a round are used at its end, and not at all if it is aborted."""
    settings = {"tokenizer": "byte", "compile_cache": program_cache, "dtype": "float32"}
    sizes = {"num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 8}
    sampler = OrcaSampler("one", str(GPT2), progress=False, **settings, **sizes)

    async def tokens() -> tuple[list[int], int]:
        answer = await sampler.sample(request([1, 2, 3], max_tokens=8))
        return answer.token_ids.tolist(), answer.metadata["policy_version"]

    async def run() -> None:
        await sampler.start()
        old, _ = await tokens()
        wanted = sampler.get_target_state()
        shapes = {
            jax.tree_util.keystr(path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)
        }
        assert shapes and (await sampler.get_mesh()).size == 1
        new = contract.WeightSyncRequest(weights=tree(1), policy_version=5)
        await sampler.pre_weight_sync(new)
        waits = asyncio.create_task(tokens())
        with pytest.raises(CheckpointError):
            await sampler.weight_sync(
                contract.WeightSyncRequest(weights=nested({("a",): np.zeros(2)}))
            )
        await sampler.weight_sync(new)
        assert not waits.done()
        await sampler.abort_weight_sync(new)
        assert await waits == (old, 0)
        await sampler.pre_weight_sync(new)
        await sampler.weight_sync(new)
        await sampler.post_weight_sync(new)
        await sampler.post_weight_sync(new)
        found, version = await tokens()
        assert found != old and version == 5
        save_tree(tree(0), tmp_path)
        await sampler.weight_sync(contract.WeightSyncRequest(weights=tmp_path))
        again, version = await tokens()
        assert again != found and version == 6
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), wanted)
        await sampler.weight_sync(contract.WeightSyncRequest(weights=zeros))
        assert (await tokens())[1] == 7, "without a round they are used at once"
        await sampler.stop()

    asyncio.run(run())


def test_what_it_refuses(sampler: OrcaSampler) -> None:
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: asyncio.run(sampler.weight_sync()), ConfigError, "needs a request with weights"),
        (sampler.get_target_state, ConfigError, "cannot be replaced"),
        (lambda: asyncio.run(sampler.get_weight_sync_metadata()), NotImplementedError, "a tree"),
        (lambda: asyncio.run(OrcaSampler("two", "demo").pause()), EngineError, "two has no model"),
    ]
    for call, kind, words in refused:
        with pytest.raises(kind, match=words):
            call()
