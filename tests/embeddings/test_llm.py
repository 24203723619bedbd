"""`LLM.embed` on the toy: every scheduler, chunks, preemption, the prefix cache, and generation in the same plans."""

import array
import math
from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.llm.embed import EmbeddingRequestOutput
from orca_jax.sim.toy import toy_pooled
from orca_jax.values.errors import RequestError
from orca_jax.values.step import StepPlan
from tests.sim.oracle import toy_generate

PROMPTS = [[1, 2, 3], list(range(40)), [7], [9] * 25]
POOLINGS: list[Any] = ["last", "mean"]


def expected(ids: list[int], pooling: str) -> list[float]:
    total, sums = 0, []
    for number, token in enumerate(ids, start=1):
        total += number * (token + 1)
        sums.append(total)
    return list(array.array("f", toy_pooled(sums, pooling, 257)))


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


def toy(**settings: Any) -> LLM:
    return LLM("preset:toy", **{"max_model_len": 64, "page_size": 4, "max_num_seqs": 4, **settings})


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 4},
    {"max_num_batched_tokens": 8, "num_pages": 17},
    {"overlap": False},
    {"enable_prefix_caching": False},
    {"scheduler": "orca"},
    {"scheduler": "request_level"},
    {"pipeline_parallel_size": 2},
    {"check_in_interval": 4},
]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_embeddings_do_not_depend_on_the_schedule(settings: dict[str, Any], pooling: Any) -> None:
    """Also beside requests that generate, which get the same tokens as ever."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with toy(**settings) as llm:
        texts = llm.stream([[5, 6], [8] * 9], params)
        for _ in range(2):  # the second time with cached prefixes
            outputs = llm.embed(PROMPTS, pooling, normalize=False, use_tqdm=False)
            assert vectors(outputs) == [expected(ids, pooling) for ids in PROMPTS]
        assert [output.prompt_token_ids for output in outputs] == [tuple(ids) for ids in PROMPTS]
        for output in texts:
            ids = list(output.prompt_token_ids)
            assert list(output.outputs[0].token_ids) == toy_generate(ids, params, vocab_size=257)
        llm.engine.pool.check_integrity()
        assert (
            llm.engine.stats.free_pages == llm.engine.stats.num_pages
            and llm.engine.stats.running == 0
        )


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepPlan]]:
    seen: list[StepPlan] = []
    from orca_jax.sim.toy import ToyExecutor

    submit = ToyExecutor.submit

    def record(self: ToyExecutor, plan: StepPlan) -> object:
        seen.append(plan)
        return submit(self, plan)

    monkeypatch.setattr(ToyExecutor, "submit", record)
    yield seen


def test_embeddings_and_texts_share_iterations(plans: list[StepPlan]) -> None:
    with toy(max_num_batched_tokens=16) as llm:
        texts = llm.stream([5, 6], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        llm._turns.step()
        llm.embed(PROMPTS[:3], "mean", use_tqdm=False)
        list(texts)
    mixed = [
        plan
        for plan in plans
        if {member.pools is not None for member in plan.members} == {True, False}
    ]
    assert mixed, "no plan has both kinds"
    for plan in plans:
        for member in plan.members:
            assert member.pools is None or not member.is_sampling, "an embedding draws no token"
    uses = [
        member.pools
        for plan in plans
        for member in plan.members
        if len(member.ids) + member.start == 40
    ]
    assert uses == ["mean"] and {"sum"} < {
        member.pools for plan in plans for member in plan.members
    }


def test_prefixes_are_read_for_last_tokens_alone() -> None:
    with toy() as llm:
        counts = [
            llm.embed([list(range(40))], pooling, use_tqdm=False)[0].num_cached_tokens
            for pooling in POOLINGS * 2
        ]
    assert counts == [0, 0, 39, 0]


def test_vectors_have_a_length_of_one() -> None:
    with toy() as llm:
        (output,) = llm.embed("abc", use_tqdm=False)
        raw = expected(list(b"abc"), "last")
        length = math.hypot(*raw)
        assert output.outputs.embedding == pytest.approx(
            [value / length for value in raw], rel=1e-6
        )
        assert math.hypot(*output.outputs.embedding) == pytest.approx(1, rel=1e-6)


def test_a_prompt_may_fill_the_context() -> None:
    with toy() as llm:
        (output,) = llm.embed([[3] * 64], normalize=False, use_tqdm=False)
        assert output.outputs.embedding == expected([3] * 64, "last")
        for wrong, problem in (
            ([3] * 65, "64; shorten"),
            ([], "empty"),
            ([257], "outside the model"),
        ):
            with pytest.raises(RequestError, match=problem) as caught:
                llm.embed([wrong])
            assert caught.value.param == "prompts[0]"
        with pytest.raises(RequestError, match="last or mean") as caught:
            llm.embed("a", "cls")  # type: ignore[arg-type]
        assert caught.value.param == "pooling"


def test_pooling_is_not_for_texts() -> None:
    with toy() as llm, pytest.raises(RequestError, match=r"LLM\.embed") as caught:
        llm.generate("a", SamplingParams(pooling="last"))
    assert caught.value.param == "pooling"
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(pooling="last", prompt_logprobs=1)
