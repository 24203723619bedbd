"""The invariants of docs/architecture.md, under any arrivals, lengths and aborts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import pytest
from hypothesis import strategies as st

from orca_jax.sched.request import Request, State
from orca_jax.values.request import DEFAULT_URGENCY, MAX_PRIORITY, SamplingParams, Urgency
from tests.run.examples import holds_for
from tests.sched.lab import VOCAB, Lab
from tests.sim.oracle import toy_score

EOS = 7


@dataclass(frozen=True)
class Arrival:
    """A request, the step of its arrival, and the number of steps until its client aborts it."""

    step: int
    prompt: list[int]
    params: SamplingParams
    patience: int | None
    urgency: Urgency = DEFAULT_URGENCY


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([-1, 0, 5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
IDS = st.integers(0, VOCAB - 1)


@st.composite
def rich_params(draw: st.DrawFn) -> SamplingParams:
    """All parameters of a request, in any combination."""
    plain = draw(PARAMS)
    fields = {
        "min_tokens": st.integers(0, plain.max_tokens),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 3.0]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, 1.0, 4.0]), max_size=5),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=6).map(tuple),
        "bad_token_ids": st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=5).map(
            tuple
        ),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    return replace(plain, **{name: draw(fields[name]) for name in sorted(chosen)})


URGENCIES = st.builds(
    Urgency,
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY) | st.integers(-2, 2),
    tenant=st.sampled_from(["", "ann", "bob"]),
    deadline=st.none() | st.floats(1, 2000),
)


def arrivals_with(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[Arrival]]:
    arrival = st.builds(
        Arrival,
        step=st.integers(0, 25),
        prompt=st.lists(IDS, min_size=1, max_size=14),
        params=params,
        patience=st.none() | st.integers(0, 12),
        urgency=st.just(DEFAULT_URGENCY) | URGENCIES,
    )
    return st.lists(arrival, min_size=1, max_size=12)


PLAIN_ARRIVALS = arrivals_with(PARAMS)
ARRIVALS = arrivals_with(PARAMS | rich_params())
SIZES = {
    "max_bs": st.integers(1, 5),
    "n_slots": st.integers(26, 120),  # 26: the longest request fits alone
    "page_size": st.integers(1, 6),
}


def serve(lab: Lab, arrivals: list[Arrival], check=lambda lab: None) -> None:
    """Play the arrivals, check after each step, and compare every token with the oracle."""
    aborts: dict[int, list[str]] = {}
    for step in range(2000):
        for number, arrival in enumerate(arrivals):
            if arrival.step == step:
                lab.engine.add_request(
                    str(number), arrival.prompt, arrival.params, urgency=arrival.urgency
                )
                if arrival.patience is not None:
                    aborts.setdefault(step + arrival.patience, []).append(str(number))
        for request_id in aborts.get(step, []):
            lab.engine.abort(request_id)
        lab.pool.check_integrity()
        lab.step()
        check(lab)
        if step >= 40 and not lab.engine.has_work:
            break
    lab.run(limit=0)
    assert sorted(lab.ends) == sorted(str(number) for number in range(len(arrivals))), (
        "every request gets one end"
    )
    for number, arrival in enumerate(arrivals):
        check_end(lab, str(number), arrival)


def check_end(lab: Lab, request_id: str, arrival: Arrival) -> None:
    tokens, end = lab.tokens[request_id], lab.ends[request_id]
    expected = lab.expected(arrival.prompt, arrival.params)
    check_rules(tokens, arrival.params)
    check_logprobs(lab, request_id, arrival)
    if end.finish_reason == "abort":
        assert arrival.patience is not None
        assert tokens == expected[: len(tokens)]
        return
    assert tokens == expected
    if end.finish_reason == "error":
        assert end.error is not None and "no token could follow" in end.error
        assert len(tokens) < arrival.params.max_tokens and not stop_ids(arrival.params) & set(
            tokens[-1:]
        )
        return
    assert end.finish_reason == ("stop" if tokens[-1] in stop_ids(arrival.params) else "length")
    assert end.metrics is not None
    times = end.metrics
    assert times.arrival < times.first_scheduled < times.first_token <= times.finished


def stop_ids(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}


def check_rules(tokens: list[int], params: SamplingParams) -> None:
    """Check the effects of parameters, independent of the oracle."""
    assert not stop_ids(params) & set(tokens[: params.min_tokens]), "an end before min_tokens"
    assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
    for bad in params.bad_token_ids:
        assert all(tuple(tokens[at : at + len(bad)]) != bad for at in range(len(tokens))), (
            "a bad sequence"
        )


def check_logprobs(lab: Lab, request_id: str, arrival: Arrival) -> None:
    """Check both kinds against the scores of the whole text: they do not depend on chunks, batches or seeds."""
    tokens, params = lab.tokens[request_id], arrival.params
    whole, num_prompt = [*arrival.prompt, *tokens], len(arrival.prompt)
    reported, reported_of_prompt = lab.logprobs[request_id], lab.prompt_logprobs.get(request_id, [])
    if params.logprobs is None:
        assert reported == []
    else:
        assert reported == toy_score(whole, params.logprobs, vocab_size=VOCAB)[num_prompt - 1 :]
    if params.prompt_logprobs is None or not tokens:
        assert reported_of_prompt == []
    else:
        assert reported_of_prompt == [
            tuple(toy_score(arrival.prompt, params.prompt_logprobs, vocab_size=VOCAB))
        ]


def in_order_of_arrival(lab: Lab) -> list[Request]:
    return sorted(lab.pool, key=lambda request: request.arrival_index)


def check_orca(lab: Lab) -> None:
    """Check the invariants of Algorithm 1, after each step."""
    live = in_order_of_arrival(lab)
    started = [request.num_iterations + request.in_flight for request in live]
    assert started == sorted(started, reverse=True), "a later request has run more iterations"
    admitted = [request.row is not None for request in live]
    assert admitted == sorted(admitted, reverse=True), (
        "the admitted are a prefix of the order of arrival"
    )
    assert lab.kv.reserved_slots <= lab.n_slots
    in_flight = [
        member.request_id for each in lab.engine._in_flight for member in each.plan.members
    ]
    assert len(set(in_flight)) == len(in_flight), "a request in two plans"
    assert {request.request_id for request in live if request.state is State.RUNNING} == set(
        in_flight
    )


class NeverHeldBack(Lab):
    """Checks each decision of `orca`, with the pool as at the decision."""

    def __init__(self, **settings: int) -> None:
        super().__init__("orca", eos=[EOS], **settings)
        select = self.scheduler.inner.select

        def checked(pool, kv):
            selection = select(pool, kv)
            choices = selection.choices
            chosen = [choice.request.request_id for choice in choices]
            idle = [request for request in pool if request.state is not State.RUNNING]
            assert chosen == [request.request_id for request in idle][: len(chosen)], (
                "a prefix, so no request starves"
            )
            assert len(chosen) <= self.max_bs
            if len(chosen) < self.max_bs:
                left = idle[len(chosen) :]
                assert all(request.state is State.INITIATION for request in left), (
                    "an increment is held back"
                )
                if left:
                    newcomers = sum(c.request.max_total for c in choices if c.request.row is None)
                    free = kv.n_slots - kv.reserved_slots - newcomers
                    assert left[0].max_total > free, "a request waits although it fits"
            return selection

        self.scheduler.inner.select = checked  # type: ignore[method-assign]


WAITS = st.lists(st.booleans(), max_size=8).map(lambda first: cycle([*first, True]))
"""The ends of an engine's waits: True for a result, False for something else before it."""


@holds_for(150, arrivals=ARRIVALS, n_workers=st.integers(1, 4), waits=WAITS, **SIZES)
def test_orca(
    arrivals: list[Arrival],
    n_workers: int,
    waits: Iterator[bool],
    max_bs: int,
    n_slots: int,
    page_size: int,
) -> None:
    lab = NeverHeldBack(max_bs=max_bs, n_workers=n_workers, n_slots=n_slots, page_size=page_size)
    lab.wait = lambda handle: next(waits)
    serve(lab, arrivals, check_orca)


def check_request_level(lab: Lab) -> None:
    """Check that plans hold members of one batch only, and no new ones until it ends."""
    for before, after in zip(lab.executor.plans, lab.executor.plans[1:], strict=False):
        old = {member.request_id for member in before.members}
        new = {member.request_id for member in after.members}
        assert new <= old or not new & old, "a request joined a running batch"


@holds_for(150, arrivals=ARRIVALS, n_workers=st.integers(1, 3), **SIZES)
def test_request_level(
    arrivals: list[Arrival], n_workers: int, max_bs: int, n_slots: int, page_size: int
) -> None:
    lab = Lab(
        "request_level",
        max_bs=max_bs,
        n_workers=n_workers,
        n_slots=n_slots,
        page_size=page_size,
        eos=[EOS],
    )
    serve(lab, arrivals)
    if n_workers == 1:
        check_request_level(lab)


@holds_for(60, arrivals=PLAIN_ARRIVALS, max_bs=st.integers(1, 4))
@pytest.mark.parametrize("name", ["orca", "request_level"])
def test_iterations_by_hand(name: str, arrivals: list[Arrival], max_bs: int) -> None:
    """With all requests at once and no aborts, the number of iterations follows from the lengths."""
    lab = Lab(name, max_bs=max_bs, n_slots=400, eos=[EOS])
    lengths = []
    for number, arrival in enumerate(arrivals):
        lab.engine.add_request(str(number), arrival.prompt, arrival.params)
        lengths.append((len(arrival.prompt), len(lab.expected(arrival.prompt, arrival.params))))
    lab.run()
    if name == "orca":
        # each place in the batch is a queue: a request takes the first place to be free
        ends = [0] * max_bs
        for _, generated in lengths:
            first = ends.index(min(ends))
            ends[first] += generated
        expected = max(ends)
    else:
        expected = 0
        for start in range(0, len(lengths), max_bs):
            batch = lengths[start : start + max_bs]
            shortest = min(prompt for prompt, _ in batch)
            expected += max(prompt - shortest + generated for prompt, generated in batch)
    assert len(lab.executor.plans) == expected
