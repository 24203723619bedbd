"""`LLM.update_params` on a real model: under load, on several devices, and what it refuses."""

import gc
from typing import Any

import jax
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.llm.outputs import RequestOutput
from orca_jax.model.trees.memory import nested
from orca_jax.values.errors import CheckpointError, ConfigError, RequestError
from tests.rollouts.test_weights import GPT2, flat_of

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [5, 6], [9] * 9]
EACH = [
    SamplingParams(max_tokens=12, temperature=0, logprobs=0),
    SamplingParams(max_tokens=9, seed=1),
    SamplingParams(max_tokens=5, temperature=0.7, seed=3, top_k=5),
]


def small(cache: str, **settings: Any) -> LLM:
    options = {
        "tokenizer": "byte",
        "compile_cache": cache,
        "progress": False,
        "dtype": "float32",
        "num_pages": 60,
    }
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 8,
        "strict_compile": True,
    }
    return LLM(str(GPT2), **{**options, **sizes, **settings})


def tree(seed: int) -> dict[str, Any]:
    """Another set of weights for each seed."""
    draw = np.random.default_rng(seed)
    return nested(
        {
            keys: value + 0.3 * draw.standard_normal(value.shape, np.float32)
            for keys, value in flat_of(GPT2).items()
        }
    )


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def held() -> tuple[int, int]:
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("few_programs", "quick_compiles")
@pytest.mark.parametrize(
    "parallel",
    [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}],
)
def test_a_hundred_updates_under_load(parallel: dict[str, int], program_cache: str) -> None:
    trees = [tree(seed) for seed in range(3)]
    with small(program_cache, **parallel) as llm:
        expected = []
        for each in trees:
            llm.update_params(each)
            outputs = llm.generate(PROMPTS, EACH, use_tqdm=False)
            expected.append(texts(outputs))
            assert [output.weight_version for output in outputs] == [len(expected)] * 3
        assert len({text for each in expected for text in each}) == 9, (
            "each set of weights has texts of its own"
        )
        before = held()
        for number in range(100):
            old, new = (number - 1) % 3, number % 3
            streams = [llm.stream(PROMPTS, EACH) for _ in range(2)]
            started = [next(stream) for stream in streams]
            assert llm.engine.num_running > 0, "the update comes while requests run"
            version = llm.update_params(trees[new])
            assert version == number + 4
            for stream, first in zip(streams, started, strict=True):
                outputs = sorted([first, *stream], key=lambda output: int(output.request_id))
                assert {output.weight_version for output in outputs} == {version - 1}
                assert texts(outputs) == expected[old]
            hits = llm.engine.pool.num_cache_hits
            outputs = llm.generate(PROMPTS, EACH, use_tqdm=False)
            assert texts(outputs) == expected[new] and llm.engine.pool.num_cache_hits == hits
            chosen = outputs[0].outputs[0].logprobs
            assert chosen is not None and len(chosen) == 12, (
                "log probabilities come from the same pass"
            )
            llm.generate(PROMPTS, EACH, use_tqdm=False)
            assert llm.engine.pool.num_cache_hits > hits
        assert held() == before
        assert llm.engine.executor.stats.compiles_while_serving == 0
        with pytest.raises(CheckpointError):
            llm.update_params({"embedding": {"table": np.zeros((3, 3), np.float32)}})
        with pytest.raises(RequestError, match="version must be an integer"):
            llm.update_params(trees[0], version=-1)
        assert texts(llm.generate(PROMPTS, EACH, use_tqdm=False)) == expected[0]


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs", "quick_compiles")
def test_open_requests_can_be_aborted_and_quantised_weights_are_kept(program_cache: str) -> None:
    with small(program_cache) as llm:
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        llm._turns.step()
        assert llm.update_params(tree(0), 7, abort_all_requests=True) == 7
        outputs = list(stream)
        assert [(output.weight_version, output.outputs[0].finish_reason) for output in outputs] == [
            (0, "abort")
        ] * 3
    with (
        small(program_cache, quantization="int8") as llm,
        pytest.raises(ConfigError, match="quantised") as caught,
    ):
        llm.update_params(tree(0))
    assert caught.value.param == "quantization"


def test_the_toy_has_no_weights() -> None:
    with LLM("preset:toy") as llm, pytest.raises(ConfigError, match="toy model has no weights"):
        llm.update_params({})


@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
def test_an_empty_prefix_cache_changes_no_token(program_cache: str) -> None:
    """Also while a request runs, whose pages no other one finds any more."""
    with small(program_cache) as llm:
        (expected,) = llm.generate([PROMPTS[0]], EACH[0], use_tqdm=False)
        (again,) = llm.generate([PROMPTS[0]], EACH[0], use_tqdm=False)
        assert again.num_cached_tokens == 17, "all but the last"
        assert llm.reset_prefix_cache() is True
        pieces = llm.stream_text(PROMPTS[0], EACH[0])
        begin = next(pieces)
        llm.reset_prefix_cache()
        (beside,) = llm.generate([PROMPTS[0]], EACH[0], use_tqdm=False)
        assert beside.num_cached_tokens == 0
        assert begin + "".join(pieces) == expected.outputs[0].text
    assert texts([again, beside]) == texts([expected] * 2)
