"""The engine's step: aborts, errors, seeds, times and numbers."""

import logging
import time
from collections.abc import Iterator

import pytest

from orca_jax.engine import PLAN_TOKENS
from orca_jax.sched.observer import Observer
from orca_jax.sched.request import Request
from orca_jax.values.errors import RequestError
from orca_jax.values.request import RequestMetrics, RequestUpdate, SamplingParams
from tests.sched.lab import VOCAB, Lab
from tests.sim.oracle import toy_generate, toy_score


def test_tokens_come_one_by_one() -> None:
    lab = Lab()
    lab.add("A", 3, 3)
    expected = lab.expected([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
    updates = [lab.step() for _ in range(3)]
    times = RequestMetrics(arrival=1.0, first_scheduled=2.0, first_token=3.0, finished=3.0)
    assert updates[:2] == [
        [RequestUpdate("A", (expected[0],), metrics=times)],
        [RequestUpdate("A", (expected[1],))],
    ]
    [last] = updates[2]
    assert (last.new_ids, last.finish_reason, last.error) == ((expected[2],), "length", None)
    assert not lab.engine.has_work
    assert lab.engine.step() == []


def test_times() -> None:
    lab = Lab()  # its clock counts readings: one in add, one for each plan, one for each delivery
    lab.add("A", 3, 2)
    lab.run()
    assert lab.ends["A"].metrics == RequestMetrics(
        arrival=1.0, first_scheduled=2.0, first_token=3.0, finished=5.0
    )


def test_abort_while_waiting() -> None:
    lab = Lab(max_bs=1)
    lab.add("A", 2, 3)
    lab.add("B", 2, 3)
    lab.step()
    assert lab.engine.abort("B")
    assert [(update.request_id, update.finish_reason) for update in lab.step()] == [
        ("B", "abort"),
        ("A", None),
    ]
    lab.run()
    assert lab.batches == ["A2", "A1", "A1"]


def test_abort_of_the_only_request_needs_no_iteration() -> None:
    lab = Lab()
    lab.add("A", 2, 3)
    lab.engine.abort("A")
    assert lab.engine.has_work
    assert lab.step() == [RequestUpdate("A", (), "abort")]
    assert lab.batches == []
    assert not lab.engine.has_work


def test_abort_in_flight_keeps_pages_until_the_iteration_is_back() -> None:
    lab = Lab(max_bs=1, n_workers=2)
    lab.add("A", 2, 5)
    lab.add("B", 2, 5)
    lab.step()  # A's iteration is collected, B's is in flight
    lab.engine.abort("B")
    assert lab.kv.num_held_rows == 2
    assert lab.engine.stats.in_flight == 1
    updates = lab.step()
    assert [(update.request_id, update.new_ids, update.finish_reason) for update in updates] == [
        ("B", (), "abort")
    ]
    assert lab.kv.num_held_rows == 1
    lab.run()
    assert lab.batches == ["A2", "B2", "A1", "A1", "A1", "A1"]


def test_abort_between_iterations_frees_at_once() -> None:
    lab = Lab()
    lab.add("A", 2, 5)
    lab.step()
    assert lab.kv.num_held_rows == 1
    lab.engine.abort("A")
    assert lab.kv.num_held_rows == 0
    assert not lab.engine.abort("A")
    lab.run()
    assert lab.ends["A"].finish_reason == "abort"


@pytest.mark.parametrize("name", ["orca", "request_level"])
def test_a_request_with_bad_logits_harms_no_other(name) -> None:
    lab = Lab(
        name,
        override=lambda request_id, length, token: (
            None if (request_id, length) == ("A", 4) else token
        ),
    )
    lab.add("A", 3, 5)
    lab.add("B", 3, 5)
    lab.run()
    expected = lab.expected([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert lab.tokens == {"A": expected[:1], "B": expected}
    assert lab.ends["A"].finish_reason == "error"
    assert "not finite" in (lab.ends["A"].error or "")
    assert lab.ends["B"].error is None


def test_a_token_after_the_end_is_dropped() -> None:
    """A's logits are not finite once. Its batch continues and computes A again, then with finite logits."""
    results: Iterator[int | None] = iter([None, 5, 6])
    lab = Lab(
        "request_level",
        override=lambda request_id, length, token: next(results) if request_id == "A" else token,
    )
    lab.add("A", 2, 3)
    lab.add("B", 2, 3)
    lab.run()
    assert lab.batches == ["A2 B2", "A1 B1", "A1 B1"]
    assert (lab.tokens["A"], lab.ends["A"].finish_reason) == ([], "error")


class Script:
    """Allows one set after another, and records the accepted tokens."""

    def __init__(self, *sets: int | RequestError) -> None:
        self.sets = list(sets)
        self.accepted: list[int] = []

    def allowed(self) -> int:
        tokens = self.sets[len(self.accepted)]
        if isinstance(tokens, RequestError):
            raise tokens
        return tokens

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


GREEDY = SamplingParams(max_tokens=3, temperature=0)


@pytest.mark.parametrize("name", ["orca", "request_level"])
def test_a_constraint_is_followed_and_advanced(name) -> None:
    lab, script = Lab(name), Script(1 << 4 | 1 << 5, 1 << 60, 1 << 7)
    lab.engine.add_request("A", [1, 2, 3], GREEDY, script)
    lab.add("B", 3, 3)
    lab.run()
    expected = lab.expected([1, 2, 3], GREEDY)
    assert lab.tokens == {"A": [4, 60, 7], "B": expected}, (
        "20 is next; 4 is the first of its set after it"
    )
    assert script.accepted == [4, 60], "all but the last; no set is needed after it"


def test_parameters_and_a_constraint_together() -> None:
    lab = Lab()
    params = SamplingParams(max_tokens=3, temperature=0, bad_token_ids=((4,), (5, 5)))
    lab.engine.add_request("A", [1, 2, 3], params, Script(*[1 << 4 | 1 << 5 | 1 << 6] * 3))
    lab.run()
    assert lab.tokens["A"] == [5, 6, 5]


@pytest.mark.parametrize("name", ["orca", "request_level"])
@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([1 << 4, 0, 1 << 4], "no token could follow"),
        ([1 << 4, 1 << VOCAB, 1 << 4], "no token could follow"),
        (
            [1 << 4, RequestError("the fuel is used up", "structured_outputs"), 1 << 4],
            "the fuel is used up",
        ),
    ],
)
def test_a_constraint_that_allows_nothing_ends_its_request_alone(name, sets, words: str) -> None:
    lab = Lab(name)
    lab.engine.add_request(
        "A", [1, 2, 3], SamplingParams(max_tokens=5, temperature=0, logprobs=1), Script(*sets)
    )
    lab.add("B", 3, 5)
    lab.run()
    assert (lab.tokens["A"], lab.ends["A"].finish_reason) == ([4], "error")
    assert words in (lab.ends["A"].error or "")
    assert len(lab.logprobs["A"]) == 1
    assert lab.tokens["B"] == lab.expected([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert lab.ends["B"].error is None
    assert [plan.is_constrained for plan in lab.executor.plans] == [True, True, False, False, False]


def test_constraints_with_several_iterations_in_flight() -> None:
    lab = Lab(max_bs=1, n_workers=3)
    scripts = {request_id: Script(1 << 4, 1 << 5, 1 << 6) for request_id in "AC"}
    lab.engine.add_request("A", [1, 2, 3], GREEDY, scripts["A"])
    lab.add("B", 3, 3)
    lab.engine.add_request("C", [1, 2, 3], GREEDY, scripts["C"])
    lab.run()
    assert lab.tokens == {"A": [4, 5, 6], "B": lab.expected([1, 2, 3], GREEDY), "C": [4, 5, 6]}


def test_the_time_of_constraints_is_counted() -> None:
    class Slow(Script):
        def allowed(self) -> int:
            time.sleep(0.01)
            return super().allowed()

    lab = Lab()
    lab.engine.add_request("A", [1, 2, 3], GREEDY, Slow(1, 1, 1))
    lab.run()
    assert lab.engine.stats.schedule_seconds >= 0.03


def test_min_tokens_cost_nothing_after_they_are_generated() -> None:
    lab = Lab(eos=[0])
    lab.engine.add_request(
        "A", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0, min_tokens=2)
    )
    lab.run()
    assert [plan.is_constrained for plan in lab.executor.plans] == [True, True, False, False]


def test_a_request_without_constraint_needs_no_sets() -> None:
    lab = Lab()
    lab.executor.constrain = None  # type: ignore[assignment, method-assign]
    lab.engine.add_request(
        "A", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0, logit_bias={4: 1.0}, logprobs=1)
    )
    lab.run()
    assert len(lab.tokens["A"]) == 3


def test_prompt_logprobs_come_with_the_first_ids() -> None:
    lab = Lab("request_level")
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, logprobs=1)
    lab.engine.add_request("A", [1, 2, 3, 4, 5], params)
    lab.add("B", 2, 4)
    lab.run()
    assert lab.batches[0] == "A2- B2", "the rest of A's prompt comes an id at a time"
    scores = toy_score([1, 2, 3, 4, 5, *lab.tokens["A"]], 1, vocab_size=VOCAB)
    assert lab.prompt_logprobs == {"A": [tuple(scores[:4])]}
    assert lab.logprobs == {"A": scores[4:], "B": []}


def test_a_rejected_request_disturbs_no_other() -> None:
    lab = Lab()
    lab.add("A", 3, 5)
    lab.step()
    for prompt, param in (([], "prompt"), ([VOCAB], "prompt"), ([1] * 60, "max_tokens")):
        with pytest.raises(RequestError) as caught:
            lab.engine.add_request("B", prompt, SamplingParams(max_tokens=5))
        assert caught.value.param == param
    with pytest.raises(RequestError, match="already"):
        lab.add("A", 1, 1)
    lab.run()
    assert lab.tokens == {"A": lab.expected([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))}


def test_seeds_are_drawn_from_the_engines_seed() -> None:
    def tokens(seed: int) -> dict[str, list[int]]:
        lab = Lab(seed=seed)
        for request_id in "AB":
            lab.engine.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=8))
        lab.run()
        return lab.tokens

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)
    assert tokens(0)["A"] != tokens(0)["B"]


def test_a_seed_of_the_request() -> None:
    lab = Lab(seed=4)
    params = SamplingParams(max_tokens=8, seed=11)
    lab.engine.add_request("A", [1, 2, 3], params)
    lab.run()
    assert lab.tokens["A"] == toy_generate([1, 2, 3], params, vocab_size=VOCAB)


def test_stats() -> None:
    lab = Lab(max_bs=2, n_workers=2, page_size=4, n_slots=20)
    for request_id in "ABCDE":
        lab.add(request_id, 3, 2)  # 5 slots and 1 page each
    lab.step()
    stats = lab.engine.stats
    assert (stats.iterations, stats.in_flight, stats.waiting, stats.running) == (1, 1, 1, 4)
    assert (stats.scheduled_requests, stats.scheduled_tokens, stats.mean_batch_size) == (4, 12, 2.0)
    assert (stats.reserved_slots, stats.free_pages) == (20, lab.kv.num_blocks[0] - 4)
    assert stats.schedule_seconds > 0
    assert stats.update_seconds > 0
    lab.run()
    stats = lab.engine.stats
    assert (stats.iterations, stats.in_flight, stats.waiting, stats.running) == (6, 0, 0, 0)
    assert stats.mean_batch_size == 10 / 6
    by_tokens = dict(zip((*PLAN_TOKENS, None), stats.plans_by_tokens, strict=True))
    assert {bound: count for bound, count in by_tokens.items() if count} == {8: 5, 1: 1}, (
        "6, 3, 2 and 1 tokens"
    )


def test_an_idle_engine_has_no_mean() -> None:
    assert Lab().engine.stats.mean_batch_size == 0.0


def test_failures_of_the_executor_are_not_swallowed() -> None:
    lab = Lab()
    lab.add("A", 2, 2)
    lab.executor.close()
    with pytest.raises(AssertionError, match="after close"):
        lab.engine.step()


def test_logging_is_off_by_default_and_lists_iterations(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab()
    lab.add("A", 2, 2)
    with caplog.at_level(logging.INFO, logger="orca_jax.engine"):
        lab.step()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="orca_jax.engine"):
        lab.step()
    assert [record.getMessage() for record in caplog.records] == ["iteration 1: 1 requests"]


def test_an_engine_is_rescheduled_while_it_is_idle_and_observers_come_and_go() -> None:
    heard: list[tuple[str, str]] = []

    class Ear(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def arrived(self, request: Request) -> None:
            heard.append((self.name, request.request_id))

    lab, other = Lab("orca"), Lab("request_level")
    own = lab.engine.observer
    with lab.engine.observed_by(Ear("outer")):
        lab.add("A", 1, 1)
        with pytest.raises(KeyError), lab.engine.observed_by(Ear("inner")):
            lab.add("B", 1, 1)
            raise KeyError
        with pytest.raises(AssertionError, match="requests are open"):
            lab.engine.reschedule(other.scheduler, other.pool)
        lab.run()
        lab.engine.reschedule(other.scheduler, other.pool, 2)
    assert lab.engine.observer is own
    assert heard == [("outer", "A"), ("outer", "B"), ("inner", "B")]
    engine = lab.engine
    assert (engine.scheduler, engine.pool, engine.check_in_interval) == (
        other.scheduler,
        other.pool,
        2,
    )
