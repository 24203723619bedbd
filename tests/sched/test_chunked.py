"""The chunked scheduler by hand, and its invariants under any arrivals."""

import pytest
from hypothesis import strategies as st

from orca_jax.assembly.choices import ordering_kind
from orca_jax.sched.orderings.priority import Priority
from orca_jax.values.config import ORDERINGS
from orca_jax.values.request import SamplingParams, Urgency
from tests.run.examples import holds_for
from tests.sched.lab import Lab, Shape, run_lab
from tests.sched.test_properties import ARRIVALS, EOS, PLAIN_ARRIVALS, WAITS, serve

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
    assert lab.engine.has_work and lab.kv.num_held_rows == 1, (
        "its row is in use until that iteration is back"
    )
    lab.run()
    assert lab.batches == ["A3", "A1"] and lab.tokens["A"] == [first]


def test_the_most_urgent_keeps_its_pages_while_increments_take_the_last() -> None:
    """In the fourth iteration B's increment takes the last page before A's chunk; A waits, and gets B's pages later."""
    lab = Lab(max_bs=2, page_size=2, shape=shaped(budget=3, num_pages=5, ordering=Priority))
    lab.add("B", 2, 6)
    lab.step()
    lab.engine.add_request(
        "A",
        [1, 2, 3, 4, 5, 6],
        SamplingParams(max_tokens=1, temperature=0),
        urgency=Urgency(priority=-10),
    )
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
        lab.engine.add_request(request_id, prompt, params)
        while request_id not in lab.ends:
            for update in lab.step():
                cached[request_id] = cached.get(request_id, 0) + update.num_cached
        assert lab.tokens[request_id] == lab.expected(prompt, params)
    assert cached == {"A": 0, "B": 4, "C": 2, "D": 3}, "one token is always computed"
    assert lab.batches == ["A5", "A1", "B1", "B1", "C1", "C1", "D1", "D1"]
    assert (lab.pool.num_cache_queries, lab.pool.num_cache_hits) == (17, 9)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "other"},
        {"prompt_logprobs": 0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 2.0},
    ],
)
def test_requests_that_read_no_pages_of_others(changes: dict) -> None:
    lab = Lab(max_bs=1, page_size=2, shape=shaped(reuses_prefixes=True))
    for request_id, params in {
        "A": SamplingParams(max_tokens=1),
        "B": SamplingParams(max_tokens=1, **changes),
    }.items():
        lab.engine.add_request(request_id, [1, 2, 3, 4, 5], params)
        lab.run()
    assert lab.batches == ["A5", "B5"]


def test_pages_are_kept_until_they_are_needed_and_the_oldest_goes_first() -> None:
    lab = Lab(max_bs=1, page_size=2, shape=shaped(reuses_prefixes=True, num_pages=6))
    params = SamplingParams(max_tokens=1, temperature=0)
    for request_id, first in (("A", 1), ("B", 11), ("C", 21), ("D", 11), ("E", 1)):
        lab.engine.add_request(request_id, [first, 2, 3], params)
        lab.run()
    assert lab.batches == ["A3", "B3", "C3", "D1", "E1"]
    lab.engine.add_request("F", list(range(31, 42)), params)  # takes all six blocks
    lab.run()
    lab.engine.add_request("G", [11, 2, 3], params)
    lab.run()
    assert lab.batches[5:] == ["F11", "G3"]


PROMPT = [1, 2, 3, 4, 5]
GREEDY = SamplingParams(max_tokens=3, temperature=0)


def suspicious_lab(*broken: tuple[str, int], **changes) -> Lab:
    """A lab with pages of two tokens; the logits of these requests after contexts of these lengths are not finite."""
    override = lambda request_id, length, token: None if (request_id, length) in broken else token  # noqa: E731
    settings = {"depth": 1, "reuses_prefixes": True, **changes}
    return Lab(
        max_bs=settings.pop("max_bs", 1), page_size=2, override=override, shape=shaped(**settings)
    )


def serve_one(lab: Lab, request_id: str, prompt: list[int] = PROMPT) -> str | None:
    """Run a request and all others to the end; return its finish reason."""
    lab.engine.add_request(request_id, prompt, GREEDY)
    lab.run()
    return lab.ends[request_id].finish_reason


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [5, 6])
def test_pages_behind_logits_that_are_not_finite_leave_the_prefix_cache(
    length: int, depth: int
) -> None:
    """Pages that the request wrote, and those that it shared, since the wrong values may be in any of them."""
    lab = suspicious_lab(("B", length), depth=depth)
    assert serve_one(lab, "A") == "length"
    assert serve_one(lab, "B") == "error"
    assert serve_one(lab, "C") == "length"
    assert serve_one(lab, "D") == "length"
    first = {batch.split()[0][:2] for batch in lab.batches}
    assert {"A5", "B1", "C5", "D1"} <= first, "C shares no page, D shares those of C"


def test_pages_computed_from_suspect_ones_leave_the_prefix_cache_too() -> None:
    """A has continued the pages of B's prompt; only other first pages are kept."""
    lab = suspicious_lab(("B", 5))
    longer, other = [*PROMPT, 6, 7, 8, 9], [9, *PROMPT]
    assert serve_one(lab, "A", longer) == "length"
    assert serve_one(lab, "O", other) == "length"
    assert serve_one(lab, "B") == "error"
    assert serve_one(lab, "C") == "length"
    assert serve_one(lab, "D", longer) == "length"
    assert serve_one(lab, "P", other) == "length"
    firsts = [next(batch for batch in lab.batches if batch[0] == name) for name in "ABCDOP"]
    assert firsts == ["A9", "B1", "C5", "D5", "O6", "P1"], (
        "D finds the two pages of C, and no page of A"
    )


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_running_sharer_of_suspect_pages_adds_none_to_the_prefix_cache(ends_first: bool) -> None:
    lab = suspicious_lab(("B", 5), max_bs=2)
    assert serve_one(lab, "A") == "length"
    long = SamplingParams(max_tokens=8, temperature=0)
    first, second = ("B", "S") if ends_first else ("S", "B")
    lab.engine.add_request(first, PROMPT, long)
    lab.engine.add_request(second, PROMPT, long)
    lab.run()
    assert (lab.ends["B"].finish_reason, lab.ends["S"].finish_reason) == ("error", "length")
    written = [*PROMPT, *lab.tokens["S"]]
    lab.engine.add_request("C", written, GREEDY)
    lab.run()
    assert next(batch for batch in lab.batches if batch[0] == "C") == f"C{len(written)}"


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_suspect_pages_of_a_request_without_its_row_leave_the_prefix_cache(how: str) -> None:
    """The bad result comes after the request was aborted, or has lost its pages, in flight."""
    lab = suspicious_lab(("B", 7), max_bs=2, depth=2)
    assert serve_one(lab, "A") == "length"
    lab.engine.add_request("B", PROMPT, GREEDY)
    lab.step()
    lab.step()  # the iteration with the bad result is in flight
    request = lab.pool.running["B"]
    assert request.in_flight
    if how == "abort":
        lab.engine.abort("B")
    else:
        lab.pool.preempt(request)
    lab.run()
    assert lab.ends["B"].finish_reason == ("abort" if how == "abort" else "error")
    assert serve_one(lab, "C") == "length"
    assert next(batch for batch in lab.batches if batch[0] == "C") == "C5"


def ahead(shape: Shape) -> Shape:
    """The shape with `depth` iterations more than stages, at most one more in a pipeline."""
    num_ahead = shape.depth if shape.stages == 1 else min(1, shape.depth)
    return shape._replace(depth=shape.stages + num_ahead, check_in_interval=max(1, num_ahead))


SHAPES = st.builds(
    Shape,
    check_in_interval=st.just(1),
    budget=st.integers(5, 24),
    stages=st.integers(1, 4),
    watermark=st.integers(0, 3),
    num_pages=st.integers(26, 40),  # of one slot at least, so that the longest request fits alone
    reuses_prefixes=st.booleans(),
    ordering=st.sampled_from([ordering_kind(name) for name in ORDERINGS]),
    depth=st.integers(0, 4),  # more than stages
).map(ahead)


def check_stages(lab: Lab, num_stages: int) -> None:
    """Check that a token on the device has left the last stage when the first stage needs it."""
    # the plan that draws the token at a position of a request
    drawn: dict[tuple[str, int], int] = {}
    for number, plan in enumerate(lab.executor.plans):
        for member in plan.members:
            if member.last_on_device:
                assert (
                    number - drawn[member.request_id, member.start + member.num_tokens - 1]
                    >= num_stages
                )
            if member.is_sampling:
                drawn[member.request_id, member.start + member.num_tokens] = number


@holds_for(
    200,
    arrivals=PLAIN_ARRIVALS,
    max_bs=st.integers(1, 5),
    page_size=st.integers(1, 4),
    shape=SHAPES,
    waits=WAITS,
)
def test_same_tokens_and_nothing_lost(
    arrivals, max_bs: int, page_size: int, shape: Shape, waits
) -> None:
    pages = -(-shape.num_pages // page_size)  # 1.0 to 1.5 times the largest need of one request
    lab = Lab(max_bs=max_bs, page_size=page_size, eos=[EOS], shape=shape._replace(num_pages=pages))
    select = lab.scheduler.inner.select

    def checked(pool, kv):
        selection = select(pool, kv)
        able = [
            r for r in lab.scheduler.inner.queue.running(pool) if not (r.finish_reason or r.aborted)
        ]
        assert not able or able[0] not in selection.preempted, (
            "the most urgent one is never preempted"
        )
        return selection

    lab.scheduler.inner.select = checked
    lab.wait = lambda handle: next(waits)
    serve(lab, arrivals)
    check_stages(lab, shape.stages)
    assert all(plan.num_tokens <= shape.budget for plan in lab.executor.plans)
    assert all(len(plan.members) <= max_bs for plan in lab.executor.plans)


@holds_for(
    200, arrivals=ARRIVALS, max_bs=st.integers(1, 5), page_size=st.integers(1, 4), shape=SHAPES
)
def test_every_parameter_of_a_request(arrivals, max_bs: int, page_size: int, shape: Shape) -> None:
    pages = -(-shape.num_pages // page_size)
    serve(
        Lab(max_bs=max_bs, page_size=page_size, eos=[EOS], shape=shape._replace(num_pages=pages)),
        arrivals,
    )
