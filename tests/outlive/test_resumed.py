"""Requests that go on in another engine: the ids, probabilities and ends that the first one would have given."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.values.config import ORDERINGS, SCHEDULERS, EngineConfig
from orca_jax.values.errors import RequestError
from orca_jax.values.request import RequestUpdate, SamplingParams, StructuredOutput
from orca_jax.values.resumed import Resumed
from tests.test_same_tokens import LLAMA, REFERENCE

SEEDED = SamplingParams(24, temperature=1.0, seed=5, ignore_eos=True)
KINDS = {
    "greedy": replace(SEEDED, temperature=0.0),
    "seeded": SEEDED,
    "scored": replace(SEEDED, logprobs=2),
    "prompt scored": replace(SEEDED, logprobs=0, prompt_logprobs=1),
    "penalised": replace(SEEDED, frequency_penalty=1.5, repetition_penalty=1.3),
    "forbidden": replace(SEEDED, min_tokens=20, ignore_eos=False, bad_token_ids=((9, 9), (3,))),
    "stopped": replace(SEEDED, stop_token_ids=(200,), max_tokens=200),
    "grammar": replace(SEEDED, structured=StructuredOutput("regex", "(ab|cd|[0-9]{3}){9,40}")),
}
PROMPTS = [[7, 1, 2, 3] * 5, [7, 1, 2, 3] * 4 + [4], [9]]


def toy(**settings: object) -> Built:
    return build_engine(EngineConfig("preset:toy", max_model_len=256, page_size=4, **settings))


def updates_of(
    built: Built,
    params: SamplingParams,
    before: Sequence[Resumed | None] = (None,) * len(PROMPTS),
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[list[RequestUpdate]]:
    """Run the prompts to their ends in one engine."""
    engine = built.engine
    for index, (prompt, resumed) in enumerate(zip(prompts, before, strict=True)):
        grammar = None if params.structured is None else built.grammars.compile(params.structured)
        engine.add_request(str(index), prompt, params, grammar, resumed=resumed)
    found: list[list[RequestUpdate]] = [[] for _ in prompts]
    while engine.has_work:
        for update in engine.step():
            found[int(update.request_id)].append(update)
    engine.pool.check_integrity()
    return found


def ids_of(updates: Sequence[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.new_ids]


def scores_of(updates: Sequence[RequestUpdate]) -> list[object]:
    return [score for update in updates for score in update.logprobs]


def cut(updates: Sequence[RequestUpdate], count: int) -> Resumed | None:
    """What the first engine has delivered, if it was lost after so many ids."""
    metrics = updates[0].metrics
    assert metrics is not None
    if not count:
        return None
    return Resumed(tuple(ids_of(updates)[:count]), metrics)


def check_cuts(
    first: Built, second: Built, params: SamplingParams, shares: Sequence[float]
) -> None:
    """Check that requests lost after a share of their ids have the same rest, in one engine after another."""
    whole = updates_of(first, params)
    for share in shares:
        counts = [math.ceil(share * len(ids_of(each))) - 1 for each in whole]
        counts = [max(0, count - index) for index, count in enumerate(counts)]
        rest = updates_of(second, params, [cut(*pair) for pair in zip(whole, counts, strict=True)])
        for before, count, after in zip(whole, counts, rest, strict=True):
            assert ids_of(after) == ids_of(before)[count:]
            assert scores_of(after) == scores_of(before)[count:]
            assert after[-1].finish_reason == before[-1].finish_reason != "error"
            assert (after[0].metrics is None) == (count > 0 and len(after) > 1)
            if count and before[0].metrics is not None and after[-1].metrics is not None:
                begun = replace(before[0].metrics, finished=after[-1].metrics.finished)
                assert after[-1].metrics == begun


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_rest_is_the_same_under_each_scheduler(scheduler: str, kind: str) -> None:
    check_cuts(toy(scheduler=scheduler), toy(scheduler=scheduler), KINDS[kind], (0.3, 0.6, 1.0))


@pytest.mark.parametrize("order", ORDERINGS)
def test_the_rest_is_the_same_under_each_order_and_without_room(order: str) -> None:
    """With few pages the resumed requests are preempted, too."""
    settings = {
        "scheduling_policy": order,
        "num_pages": 64,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 3,
    }
    check_cuts(toy(**settings), toy(**settings), SEEDED, (0.5,))


def test_ids_of_another_vocabulary_are_refused() -> None:
    whole = updates_of(toy(), SEEDED)
    resumed = cut(whole[0], 3)
    assert resumed is not None
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        updates_of(toy(), SEEDED, [replace(resumed, ids=(300,)), None, None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "seeded", "scored", "penalised", "forbidden"])
def test_the_rest_is_the_same_with_a_model(kind: str) -> None:
    config = EngineConfig(
        str(REFERENCE / LLAMA), tokenizer="byte", dtype="float32", max_num_seqs=4, page_size=8,
        num_pages=60, max_num_batched_tokens=16, max_model_len=64, progress=False,
    )  # fmt: skip
    built = build_engine(config)
    params = replace(KINDS[kind], stop_token_ids=(), bad_token_ids=((3,),) * (kind == "forbidden"))
    whole = updates_of(built, params)
    for count in (1, 11, 23):
        rest = updates_of(built, params, [cut(each, count) for each in whole])
        for before, after in zip(whole, rest, strict=True):
            assert ids_of(after) == ids_of(before)[count:]
    built.engine.executor.close()
