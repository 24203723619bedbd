"""Fits recover the cost, and a replay under the recorded scheduler equals the recording."""

import dataclasses
import random

import pytest

from orca_jax.sim.cost import LinearCost, padded, windows_of, work_of
from orca_jax.timeline.measure import Timeline, figures, token_times
from orca_jax.timeline.writer import IterationRecord
from orca_jax.tools.bench.replay import replay
from orca_jax.tools.timeline.fit import SOUND, fit_cost
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Shape, groups_of
from tests.timeline.traced import ONE, TracedLab, batches

COST = LinearCost(per_iteration=1.0, per_token=0.5, per_pair=0.0)
REQUESTS = [("A", 9, 4), ("B", 3, 7), ("C", 12, 1), ("D", 5, 5), ("E", 8, 3), ("F", 2, 9)]
LABS = {
    "orca": {"max_bs": 3, "n_slots": 40},
    "orca, two in flight": {"max_bs": 2, "n_slots": 60, "n_workers": 2},
    "request_level": {"name": "request_level", "max_bs": 3, "n_slots": 50},
    "chunked": {"max_bs": 3, "shape": ONE._replace(budget=6)},
    "chunked, overlapped": {"max_bs": 3, "shape": ONE._replace(budget=6, depth=2)},
    "chunked, few pages": {
        "max_bs": 4,
        "page_size": 2,
        "shape": ONE._replace(budget=8, num_pages=9, depth=2),
    },
    "chunked, many ahead": {
        "max_bs": 2,
        "shape": ONE._replace(budget=8, depth=4, check_in_interval=3),
    },
    "chunked, prefixes": {"max_bs": 2, "page_size": 2, "shape": Shape(budget=8, depth=2)},
}


@pytest.mark.parametrize("case", LABS)
def test_the_same_scheduler_makes_the_same_batches(case: str) -> None:
    lab = TracedLab(**LABS[case])
    for name, num_prompt, max_tokens in REQUESTS:
        # A replay has no beginnings of pages in common: none of these prompts may end within a page of another one.
        lab.add(name, num_prompt | 1 if case == "chunked, prefixes" else num_prompt, max_tokens)
    lab.run()
    run = lab.timeline
    again = replay(run, run.head.config, COST)
    assert batches(again) == batches(run)
    for name in ("preempted", "held", "free_pages", "waiting"):
        assert [getattr(i, name) for i in again.iterations] == [
            getattr(i, name) for i in run.iterations
        ], name
    assert [(n, end.generated, end.cached) for n, end in again.ends.items()] == [
        (n, end.generated, end.cached) for n, end in run.ends.items()
    ]


def test_a_replay_has_the_recorded_groups_and_pools() -> None:
    """Two pools, one of them for layers with a window; another number of blocks of the first one is one of both."""
    shape = ONE._replace(budget=8, num_pages=9)
    lab = TracedLab(max_bs=4, page_size=2, shape=shape, groups=groups_of(None, 4, pools=(0, 1)))
    for request in REQUESTS:
        lab.add(*request)
    lab.run()
    run = lab.timeline
    again = replay(run, run.head.config, COST)
    assert again.head.cache == run.head.cache and len(run.head.cache.num_blocks) == 2
    assert batches(again) == batches(run)
    more = replay(run, dataclasses.replace(run.head.config, num_pages=64), COST)
    # Requests of 32 tokens hold 16 blocks, and 3 in the window.
    assert more.head.cache.num_blocks == (64, 4 * 3)


def test_a_replay_has_the_recorded_states() -> None:
    """Chunks end at borders in both; with more rows than recorded there is a state for each of them."""
    lab = TracedLab(max_bs=3, shape=Shape(budget=30, depth=1), spare_states=4)
    for name, num_prompt, max_tokens in (("A", 21, 3), ("B", 34, 5)):
        lab.add(name, num_prompt, max_tokens)
    lab.run()
    run = lab.timeline
    again = replay(run, run.head.config, COST)
    assert batches(again) == batches(run) and (0, 0, 20) in batches(run)[0]
    assert again.head.cache.num_states == 7
    assert (
        replay(
            run, dataclasses.replace(run.head.config, max_num_seqs=9), COST
        ).head.cache.num_states
        == 18
    )


def test_the_fit_knows_windows() -> None:
    """The cost of a pair is found, and not if layers with windows count as if they read all tokens."""
    windows = groups_of(None, 32, 32, 32)
    run = synthetic(LinearCost(5e-3, 4e-5, 3e-7), windows)
    fit = fit_cost(run)
    assert fit.cost.per_pair == pytest.approx(3e-7) and fit.r_squared == pytest.approx(1)
    run.head = dataclasses.replace(
        run.head, cache=dataclasses.replace(run.head.cache, groups=ONE_GROUP)
    )
    assert fit_cost(run).cost.per_pair < 1e-7


def alone(num_prompt: int, max_tokens: int, groups: tuple[LayerGroup, ...] = ONE_GROUP) -> Timeline:
    lab = TracedLab(max_bs=1, shape=ONE, groups=groups)
    lab.add("A", num_prompt, max_tokens)
    lab.run()
    return lab.timeline


def test_virtual_time_by_hand() -> None:
    """Four tokens take 3 s, one takes 1.5 s. The host takes 0.25 s before each, with one iteration in flight."""
    run = alone(4, 3)
    again = replay(run, run.head.config, dataclasses.replace(COST, host=0.25))
    start = run.iterations[0].selected
    assert token_times(again)[0] == pytest.approx([start + 3.25, start + 5.0, start + 6.75])
    shown = figures(again)
    arrival = again.arrivals[0].at
    assert shown["p99_inter_token_ms"] == pytest.approx(1750)
    assert shown["median_ttft_ms"] == pytest.approx(1e3 * (start + 3.25 - arrival))
    assert shown["median_normalized_latency_ms"] == pytest.approx(
        1e3 * (start + 6.75 - arrival) / 3
    )


def test_overlap_hides_the_host() -> None:
    run = alone(4, 3)
    config = dataclasses.replace(run.head.config, overlap=True)
    again = replay(run, config, dataclasses.replace(COST, host=0.25))
    start = run.iterations[0].selected
    assert token_times(again)[0] == pytest.approx([start + 3.25, start + 4.75, start + 6.25])


def test_another_scheduler_and_a_late_arrival() -> None:
    """B arrives during the prompt of A, which runs whole under `orca`, and in chunks of 4 under `chunked`."""
    run = alone(12, 2)
    late = dataclasses.replace(
        run.arrivals[0], n=1, request_id="B", at=run.iterations[0].selected + 0.5, prompt=2
    )
    run.arrivals[1], run.ends[1] = late, dataclasses.replace(run.ends[0], n=1)
    config = dataclasses.replace(run.head.config, max_num_seqs=2, max_num_batched_tokens=4)
    chunked = replay(run, config, COST)
    orca = replay(run, dataclasses.replace(config, scheduler="orca"), COST)
    assert batches(chunked) == [
        [(0, 0, 4)],
        [(0, 4, 4)],
        [(0, 8, 4)],
        [(0, 12, 1), (1, 0, 2)],
        [(1, 2, 1)],
    ]
    assert batches(orca) == [[(0, 0, 12)], [(0, 12, 1), (1, 0, 2)], [(1, 2, 1)]]
    assert chunked.arrivals[1].at == orca.arrivals[1].at == late.at


def test_a_request_aborted_before_its_first_token_is_left_out() -> None:
    lab = TracedLab(max_bs=1, shape=ONE)
    lab.add("A", 3, 3)
    lab.add("B", 3, 3)
    lab.step()
    lab.engine.abort("B")
    lab.run()
    again = replay(lab.timeline, lab.timeline.head.config, COST)
    assert {arrival.request_id for arrival in again.arrivals.values()} == {"0"}


def test_a_stopped_request_ends_where_it_ended() -> None:
    params = SamplingParams(max_tokens=9, temperature=0)
    third = TracedLab().expected([1, 2, 3], params)[2]
    lab = TracedLab(max_bs=1, shape=ONE, eos=[third])
    lab.engine.add_request("A", [1, 2, 3], params)
    lab.run()
    generated = lab.timeline.ends[0].generated
    assert generated < 9
    assert replay(lab.timeline, lab.timeline.head.config, COST).ends[0].generated == generated


def test_nothing_to_replay() -> None:
    run = alone(3, 1)
    run.ends.clear()
    with pytest.raises(ConfigError, match="nothing to replay"):
        replay(run, run.head.config, COST)


def synthetic(
    cost: LinearCost, groups: tuple[LayerGroup, ...] = ONE_GROUP, count: int = 40
) -> Timeline:
    """A timeline with device times by `cost`, and 2 ms of the host per iteration."""
    run, draw = alone(3, 1, groups), random.Random(0)
    run.iterations.clear()
    for number in range(count):
        increments = [(n, draw.randint(1, 500)) for n in range(draw.randint(1, 30))]
        chunks = [(50, draw.randint(0, 200), draw.randint(2, 300), True)][: draw.randint(0, 1)]
        tokens = len(increments) + sum(size for _, _, size, _ in chunks)
        members = [(s, 1, True) for _, s in increments] + [
            (s, size, False) for _, s, size, _ in chunks
        ]
        work = work_of(members, windows=windows_of(groups))
        (seconds,) = cost.stages(work._replace(padding=7), 1)
        times = {
            "selected": 0.0,
            "planned": 0.0015,
            "submitted": 0.002,
            "device": seconds,
            "update": 0.0005,
        }
        counts = {
            "tokens": tokens,
            "padding": 7,
            "launches": 1,
            "running": 0,
            "waiting": 0,
            "free_pages": 0,
        }
        run.iterations.append(IterationRecord(number, increments=increments, chunks=chunks, repeats=[], preempted=[],
                                        held=None, **times, **counts))  # fmt: skip
    return run


@pytest.mark.parametrize("weights", [(5e-3, 4e-5, 3e-8), (1e-3, 0.0, 2e-7), (0.0, 1e-4, 0.0)])
def test_the_fit_finds_the_cost(weights: tuple[float, float, float]) -> None:
    fit = fit_cost(synthetic(LinearCost(*weights)))
    found = (fit.cost.per_iteration, fit.cost.per_token, fit.cost.per_pair)
    assert found == pytest.approx(weights, rel=1e-6, abs=1e-12)
    assert fit.cost.host == pytest.approx(0.002) and fit.r_squared == pytest.approx(1)


def test_no_work_has_a_negative_price() -> None:
    fit = fit_cost(synthetic(LinearCost(0.1, -1e-4, 1e-6)))
    assert (
        min(fit.cost.per_iteration, fit.cost.per_token, fit.cost.per_pair) >= 0
        and fit.r_squared < 1
    )


def test_a_fit_without_explanatory_power_has_a_warning() -> None:
    """Device times that do not depend on the work: nothing predicts them."""
    run, draw = synthetic(LinearCost(5e-3, 4e-5, 3e-8)), random.Random(1)
    assert fit_cost(run).warning is None
    for iteration in run.iterations:
        iteration.device = draw.uniform(0.0, 1.0)
    fit = fit_cost(run)
    assert fit.r_squared < SOUND and fit.warning is not None and "not reliable" in fit.warning


def test_work_is_counted_with_its_padding() -> None:
    assert work_of([(0, 3, False)]).chunk_pairs == 1 + 2 + 3
    both = work_of([(9, 1, True), (4, 2, False)])
    assert (both.context, both.chunk_pairs) == (10, 5 + 6)
    assert [padded(n, (4, 8)) for n in (1, 4, 5, 8, 9, 16)] == [4, 4, 8, 8, 12, 16]
    assert padded(9, ()) == 9


def shortest_of(run: Timeline, predictor: str, recorded: str = "bound") -> list[int]:
    """The prompt lengths in the order of execution on a single row, in a replay by predicted length."""
    head = dataclasses.replace(
        run.head, config=dataclasses.replace(run.head.config, length_predictor=recorded)
    )
    config = dataclasses.replace(
        head.config, scheduling_policy="shortest", length_predictor=predictor, max_num_seqs=1
    )
    again = replay(dataclasses.replace(run, head=head), config, COST)
    order = [
        n
        for iteration in again.iterations
        for n, *_ in batches(Timeline(again.head, iterations=[iteration]))[0]
    ]
    return [again.arrivals[n].prompt for n in dict.fromkeys(order)]


def test_the_oracle_has_the_recorded_lengths() -> None:
    """Prompts of 3, 2 and 1 tokens with at most 9, 8 and 7 generated ones; 1, 3 and 2 were generated."""
    run = alone(3, 9)
    for n, prompt, generated, said in ((0, 3, 1, 5.0), (1, 2, 3, 1.0), (2, 1, 2, 3.0)):
        arrival = dataclasses.replace(
            run.arrivals[0], n=n, prompt=prompt, max_tokens=9 - n, predicted=said
        )
        run.arrivals[n], run.ends[n] = (
            arrival,
            dataclasses.replace(run.ends[0], n=n, generated=generated),
        )
    assert shortest_of(run, "bound") == [1, 2, 3]
    assert shortest_of(run, "oracle") == [3, 1, 2]
    assert shortest_of(run, "/a/ranker", recorded="/a/ranker") == [2, 1, 3], (
        "its predictions are in the timeline"
    )
    with pytest.raises(ConfigError, match="length_predictor"):
        shortest_of(run, "/a/ranker")
