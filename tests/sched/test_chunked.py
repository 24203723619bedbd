"""The chunked scheduler by hand, and its invariants under any arrivals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.build.settings import ORDERINGS
from orca_jax.request import SamplingParams, Urgency
from orca_jax.sched.orderings.priority import Priority
from tests.sched.lab import Lab, Shape, run_lab
from tests.sched.test_properties import ARRIVALS, EOS, PLAIN_ARRIVALS, serve

ONE = Shape(depth=1, reuses_prefixes=False)


def shaped(**changes) -> Shape:
    return ONE._replace(**changes)


TABLE = {
    "increments first, the prompt's chunk fills the budget": (
        {"max_bs": 2, "shape": shaped(budget=4)},
        [("A", 3, 4), ("B", 7, 2)],
        ["A3 B1-", "A1 B3-", "A1 B3", "A1 B1"],
    ),
    "a long prompt runs in chunks, and a later one joins the last chunk": (
        {"max_bs": 3, "shape": shaped(budget=5)},
        [("A", 12, 1), ("B", 2, 1)],
        ["A5-", "A5-", "A2 B2"],
    ),
    "rows bound the batch": (
        {"max_bs": 1, "shape": shaped(budget=8)},
        [("A", 2, 2), ("B", 2, 1)],
        ["A2", "A1", "B2"],
    ),
    "overlap: the third iteration is chosen before the first token of the second is known": (
        {"max_bs": 1, "shape": shaped(budget=8, depth=2)},
        [("A", 2, 3), ("B", 2, 1)],
        ["A2", "A1", "A1", "B2"],
    ),
    "the later one is preempted when pages run out, and computes its tokens again": (
        {"max_bs": 2, "page_size": 2, "shape": shaped(budget=8, num_pages=4)},
        [("A", 3, 4), ("B", 3, 4)],
        ["A3 B3", "A1 B1", "A1", "A1", "B5", "B1"],
    ),
    "admission counts the pages of the whole prompt": (
        {"max_bs": 2, "page_size": 2, "shape": shaped(budget=4, num_pages=4)},
        [("A", 6, 2), ("B", 3, 1)],
        ["A4-", "A2", "A1", "B3"],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_by_hand(case: str) -> None:
    sizes, requests, iterations = TABLE[case]
    lab = run_lab(requests, **sizes)
    assert lab.batches == iterations
    for request_id, num_prompt, max_tokens in requests:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        assert lab.tokens[request_id] == lab.expected(list(range(1, num_prompt + 1)), params)


def test_a_token_past_the_end_is_dropped() -> None:
    """The second iteration is in flight before the host sees the first one's end token."""
    params = SamplingParams(max_tokens=5, temperature=0)
    first = Lab().expected([1, 2, 3], params)[0]
    lab = Lab(max_bs=1, eos=[first], shape=shaped(depth=2))
    lab.add("A", 3, 5)
    [update] = lab.step()
    assert (update.new_ids, update.finish_reason) == ((first,), "stop")
    assert lab.engine.has_work and lab.kv.num_held_rows == 1, "its row is in use until that iteration is back"
    lab.run()
    assert lab.batches == ["A3", "A1"] and lab.tokens["A"] == [first]


def test_the_most_urgent_keeps_its_pages_while_increments_take_the_last() -> None:
    """In the fourth iteration B's increment takes the last page before A's chunk; A waits, and gets B's pages later."""
    lab = Lab(max_bs=2, page_size=2, shape=shaped(budget=3, num_pages=5, ordering=Priority))
    lab.add("B", 2, 6)
    lab.step()
    lab.engine.add("A", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=1, temperature=0), urgency=Urgency(priority=-10))
    lab.run()
    assert lab.batches == ["B2", "B1 A2-", "B1 A2-", "B1", "B1", "A2", "B3-", "B3-", "B1"]
    assert lab.pool.num_preemptions == 1


def test_preempted_in_flight() -> None:
    """With two iterations in flight, a request loses its pages while its token is still on the device."""
    lab = Lab(max_bs=2, page_size=2, shape=shaped(depth=2, num_pages=4))
    lab.add("A", 3, 5)
    lab.add("B", 3, 5)
    lab.run()
    assert lab.pool.num_preemptions >= 1
    expected = lab.expected([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert lab.tokens == {"A": expected, "B": expected}


def test_prefixes_are_reused() -> None:
    lab = Lab(max_bs=1, page_size=2, shape=shaped(reuses_prefixes=True))
    params = SamplingParams(max_tokens=2, temperature=0)
    prompts = {"A": [1, 2, 3, 4, 5], "B": [1, 2, 3, 4, 5], "C": [1, 2, 9], "D": [1, 2, 3, 4]}
    cached = {}
    for request_id, prompt in prompts.items():
        lab.engine.add(request_id, prompt, params)
        while request_id not in lab.ends:
            for update in lab.step():
                cached[request_id] = cached.get(request_id, 0) + update.num_cached
        assert lab.tokens[request_id] == lab.expected(prompt, params)
    assert cached == {"A": 0, "B": 4, "C": 2, "D": 2}, "full pages only, and one token is always computed"
    assert lab.batches == ["A5", "A1", "B1", "B1", "C1", "C1", "D2", "D1"]
    assert (lab.pool.num_cache_queries, lab.pool.num_cache_hits) == (17, 8)


@pytest.mark.parametrize(
    "changes",
    [{"cache_salt": "other"}, {"prompt_logprobs": 0}, {"presence_penalty": 1.0}, {"repetition_penalty": 2.0}],
)
def test_requests_that_read_no_pages_of_others(changes: dict) -> None:
    lab = Lab(max_bs=1, page_size=2, shape=shaped(reuses_prefixes=True))
    for request_id, params in {"A": SamplingParams(max_tokens=1), "B": SamplingParams(max_tokens=1, **changes)}.items():
        lab.engine.add(request_id, [1, 2, 3, 4, 5], params)
        lab.run()
    assert lab.batches == ["A5", "B5"]


def test_pages_are_kept_until_they_are_needed_and_the_oldest_goes_first() -> None:
    lab = Lab(max_bs=1, page_size=2, shape=shaped(reuses_prefixes=True, num_pages=4))
    params = SamplingParams(max_tokens=1, temperature=0)
    for request_id, first in (("A", 1), ("B", 11), ("C", 21), ("D", 11), ("E", 1)):
        lab.engine.add(request_id, [first, 2, 3], params)
        lab.run()
    assert lab.batches == ["A3", "B3", "C3", "D1", "E1"]
    lab.engine.add("F", [31, 2, 3, 4, 5, 6, 7], params)  # takes all four pages
    lab.run()
    lab.engine.add("G", [11, 2, 3], params)
    lab.run()
    assert lab.batches[5:] == ["F7", "G3"]


SHAPES = st.builds(
    Shape,
    budget=st.integers(5, 24),
    depth=st.integers(1, 2),
    watermark=st.integers(0, 3),
    num_pages=st.integers(26, 40),  # of one slot at least, so that the longest request fits alone
    reuses_prefixes=st.booleans(),
    ordering=st.sampled_from(list(ORDERINGS.values())),
    intervals=st.sampled_from([None, None, (1, 2), (2, 3)]),
).map(lambda shape: shape._replace(depth=1) if shape.intervals else shape)
MANY = settings(max_examples=200, deadline=None)


@MANY
@given(arrivals=PLAIN_ARRIVALS, max_bs=st.integers(1, 5), page_size=st.integers(1, 4), shape=SHAPES)
def test_same_tokens_and_nothing_lost(arrivals, max_bs: int, page_size: int, shape: Shape) -> None:
    pages = -(-shape.num_pages // page_size)  # 1.0 to 1.5 times the largest need of one request
    lab = Lab(max_bs=max_bs, page_size=page_size, eos=[EOS], shape=shape._replace(num_pages=pages))
    select = lab.scheduler.inner.select

    def checked(pool, kv):
        selection = select(pool, kv)
        able = [r for r in lab.scheduler.inner.ordering.running(pool) if not (r.finish_reason or r.aborted)]
        assert not able or able[0] not in selection.preempted, "the most urgent one is never preempted"
        return selection

    lab.scheduler.inner.select = checked
    serve(lab, arrivals)
    assert all(plan.num_tokens <= shape.budget for plan in lab.executor.plans)
    assert all(len(plan.members) <= max_bs for plan in lab.executor.plans)


@MANY
@given(arrivals=ARRIVALS, max_bs=st.integers(1, 5), page_size=st.integers(1, 4), shape=SHAPES)
def test_every_parameter_of_a_request(arrivals, max_bs: int, page_size: int, shape: Shape) -> None:
    pages = -(-shape.num_pages // page_size)
    serve(Lab(max_bs=max_bs, page_size=page_size, eos=[EOS], shape=shape._replace(num_pages=pages)), arrivals)
