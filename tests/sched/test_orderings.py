"""The first requests under each ordering, by hand; and its bound on waiting, under any arrivals.

The lab's clock counts its readings: the first three requests arrive at 1, 2 and 3 seconds.
"""

import gc
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.assembly.choices import ordering_kind
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.deadline import PATIENCE, EarliestDeadline
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.orderings.priority import SECONDS_PER_STEP, Priority
from orca_jax.sched.orderings.shortest import SECONDS_PER_TOKEN, ShortestFirst
from orca_jax.sched.pool import ClientBound, RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Selection
from orca_jax.values.config import ORDERINGS
from orca_jax.values.errors import RequestError
from orca_jax.values.request import MAX_PRIORITY, SamplingParams, Urgency
from tests.run.examples import holds_for
from tests.sched.lab import VOCAB, Lab, Shape
from tests.sched.test_properties import EOS, PLAIN_ARRIVALS, serve

ONE = Shape(budget=8, depth=1, reuses_prefixes=False)


def urgency(text: str) -> Urgency:
    """`ann`, `p-1`, `d30`, or `-` for nothing."""
    if text[1:].lstrip("-").isdigit():
        return (
            Urgency(priority=int(text[1:])) if text[0] == "p" else Urgency(deadline=float(text[1:]))
        )
    return Urgency(tenant=text.strip("-"))


# Requests as `id urgency prompt+generated`, in order of arrival before the first step -> iterations.
BY_HAND = {
    "fcfs reads no urgency": ("fcfs", 1, "A p9 1+1, B ann 1+1, C d1 1+1", "A1|B1|C1"),
    "the lowest priority first": ("priority", 1, "A p1 1+2, B p0 1+1, C p-1 1+1", "C1|B1|A1|A1"),
    "one class in order of arrival": (
        "priority",
        1,
        "A p2 1+1, B p1 1+1, C p2 1+1, D p1 1+1",
        "B1|D1|A1|C1",
    ),
    "a running request is not interrupted, but gives up its pages": (
        "priority",
        2,
        "A p1 6+4, B p0 6+4",
        "B6 A2-|B1 A4|B1 A1|B1|A8|A1",
    ),
    "the earliest deadline first": (
        "deadline",
        1,
        "A d9 1+1, B d7 1+1, C - 1+1, D d1 1+1",
        "D1|B1|A1|C1",
    ),
    "no deadline means ten minutes": (
        "deadline",
        1,
        "A - 1+1, B d600 1+1, C d598 1+1, D d596 1+1",
        "D1|A1|C1|B1",
    ),
    "the least output first": (
        "shortest",
        1,
        "A - 1+7, B - 1+1, C - 1+2",
        "B1|C1|C1|A1|A1|A1|A1|A1|A1|A1",
    ),
    "a token is half a second": (
        "shortest",
        1,
        "A - 1+5, B - 1+3, C - 1+2, D - 1+1",
        "A1|A1|A1|A1|A1|B1|B1|B1|C1|C1|D1",
    ),
    "tenants take turns": (
        "fair",
        1,
        "A ann 1+1, B ann 1+1, C ann 1+1, D bob 1+1, E bob 1+1",
        "A1|D1|B1|E1|C1",
    ),
    "turns are of tokens": (
        "fair",
        1,
        "A ann 4+1, B ann 1+1, C bob 1+1, D bob 1+2, E bob 1+1",
        "A4|C1|D1|D1|E1|B1",
    ),
    "and are counted as rows are given": (
        "fair",
        2,
        "A ann 2+1, B ann 1+1, C bob 1+1, D bob 1+1",
        "A2 C1|D1 B1",
    ),
    "a tenant with its share of rows is passed over": (
        "fair",
        2,
        "A ann 6+1, B bob 1+4, C ann 1+1, D bob 1+1",
        "A6 B1|B1 C1|B1 D1|B1",
    ),
    "unless no other one waits": (
        "fair",
        2,
        "A ann 1+2, B bob 1+4, C bob 1+1, D bob 1+1",
        "A1 B1|A1 B1|B1 C1|B1 D1",
    ),
    "a tenant without a name is one": ("fair", 1, "A - 1+1, B - 1+1, C ann 1+1", "A1|C1|B1"),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    name, max_bs, requests, iterations = BY_HAND[case]
    lab = Lab(
        max_bs=max_bs, page_size=2, shape=ONE._replace(ordering=ordering_kind(name), num_pages=8)
    )
    for request in requests.split(", "):
        request_id, wish, lengths = request.split()
        num_prompt, _, max_tokens = lengths.partition("+")
        lab.add(request_id, int(num_prompt), int(max_tokens), urgency(wish))
    lab.run()
    assert "|".join(lab.batches) == iterations


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *(
            ({"priority": value}, "priority")
            for value in (MAX_PRIORITY + 1, -MAX_PRIORITY - 1, True, 0.5)
        ),
        *(
            ({"deadline": value}, "deadline")
            for value in (0, -1.0, float("nan"), float("inf"), "1")
        ),
    ],
)
def test_values_out_of_range(changes: dict, param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        Urgency(**changes)
    assert caught.value.param == param


KEYS: dict[str, Callable[[Request], tuple[float, int]]] = {
    "fcfs": lambda request: (0.0, request.arrival_index),
    "priority": lambda request: (
        request.arrival + 10 * request.urgency.priority,
        request.arrival_index,
    ),
    "deadline": lambda request: (
        request.arrival + (request.urgency.deadline or 600),
        request.arrival_index,
    ),
    "shortest": lambda request: (
        request.arrival + request.params.max_tokens / 2,
        request.arrival_index,
    ),
}


class Watched(Lab):
    """Checks every decision against a key, with the pool as at the decision."""

    def __init__(self, name: str, max_bs: int, page_size: int, shape: Shape) -> None:
        shape = shape._replace(
            ordering=ordering_kind(name), num_pages=-(-(shape.num_pages or 0) // page_size)
        )
        super().__init__(max_bs=max_bs, page_size=page_size, eos=[EOS], shape=shape)
        select = self.scheduler.inner.select

        def checked(pool: RequestPool, kv: KVManager) -> Selection:
            waiting = sorted((r for r in pool if r.row is None and not r.in_flight), key=KEYS[name])
            running = sorted((r for r in pool if r.row is not None), key=KEYS[name])
            selection = select(pool, kv)
            chosen = [choice.request for choice in selection.choices]
            computing = [r.prompt_ids for r in running if self.num_known(r) < len(r.prompt_ids)]
            for request in [request for request in chosen if request.row is None]:
                while waiting[0] is not request:
                    assert waiting.pop(0).prompt_ids in computing, "a request was overtaken"
                computing.append(waiting.pop(0).prompt_ids)
            for victim in selection.preempted:
                behind = running[running.index(victim) :]
                assert all(r in chosen or r in selection.preempted for r in behind if live(r)), (
                    "a less urgent one stays"
                )
            return selection

        self.scheduler.inner.select = checked  # type: ignore[method-assign]

    def num_known(self, request: Request) -> int:
        """The computed tokens without those of iterations in flight: others find these only after the results."""
        members = [
            each
            for plan in self.executor.plans
            for each in plan.members
            if each.request_id == request.request_id
        ]
        return members[-request.in_flight].start if request.in_flight else request.num_computed


def live(request: Request) -> bool:
    return not (request.finish_reason or request.aborted)


SHAPES = st.builds(
    Shape,
    budget=st.integers(5, 24),
    depth=st.integers(1, 2),
    stages=st.just(1),
    watermark=st.integers(0, 3),
    num_pages=st.integers(26, 60),  # of one slot at least, so that the longest request fits alone
    reuses_prefixes=st.booleans(),
    ordering=st.just(FirstComeFirstServed),
    check_in_interval=st.just(1),  # `builds` may draw fields that have a default
)
SIZES = {"max_bs": st.integers(1, 5), "page_size": st.integers(1, 4), "shape": SHAPES}


@holds_for(600, name=st.sampled_from(sorted(KEYS)), arrivals=PLAIN_ARRIVALS, **SIZES)
def test_no_request_is_overtaken(
    name: str, arrivals, max_bs: int, page_size: int, shape: Shape
) -> None:
    """Every newcomer is the first waiting request whose prompt no other one computes.

    The last running one is preempted first; tokens are the same.
    """
    serve(Watched(name, max_bs, page_size, shape), arrivals)


@pytest.mark.parametrize(("depth", "second"), [(1, "A1 B1"), (2, "A1 C1-")])
def test_a_request_is_overtaken_until_the_prompt_is_known(depth: int, second: str) -> None:
    """B has A's prompt, whose iteration may be in flight when the second one is chosen."""
    lab = Watched(
        "fcfs", 2, 1, ONE._replace(budget=2, depth=depth, reuses_prefixes=True, num_pages=40)
    )
    for request_id, prompt in {"A": [5, 6], "B": [5, 6], "C": [1, 2, 3]}.items():
        lab.engine.add_request(request_id, prompt, SamplingParams(max_tokens=2))
    lab.run()
    assert lab.batches[:2] == ["A2", second]


@pytest.mark.parametrize(
    ("ordering", "patient", "hurried", "bound"),
    [
        (FirstComeFirstServed, Urgency(), Urgency(-MAX_PRIORITY), 0),
        (Priority, Urgency(3), Urgency(), 3 * SECONDS_PER_STEP),
        (Priority, Urgency(), Urgency(-4), 4 * SECONDS_PER_STEP),
        (EarliestDeadline, Urgency(), Urgency(deadline=1), PATIENCE - 1),
        (EarliestDeadline, Urgency(deadline=50), Urgency(deadline=1), 49),
    ],
)
def test_no_request_waits_for_ever(
    ordering, patient: Urgency, hurried: Urgency, bound: float
) -> None:
    """One row, and more urgent requests than it can serve: those that arrive after the bound are served later."""
    lab = Lab(max_bs=1, shape=ONE._replace(ordering=ordering))
    lab.add("patient", 1, 1, patient)
    arrival, arrivals = lab.now, {}
    for number in range(2000):
        if "patient" in lab.ends:
            break
        for request_id in (f"{number}a", f"{number}b"):
            lab.add(request_id, 1, 1, hurried)
            arrivals[request_id] = lab.now
        lab.step()
    assert "patient" in lab.ends
    before = [arrivals[request_id] - arrival for request_id in lab.ends if request_id != "patient"]
    assert all(late <= bound for late in before)
    assert len(before) >= bound / 5, (
        "until then the hurried ones come first: a step takes four seconds here"
    )


class Said(ClientBound):
    """Predictions without a bound: a request of one token can have a long prediction."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        return self.lengths[request.request_id]


@settings(max_examples=60, deadline=None)
@given(
    wishes=st.lists(
        st.tuples(st.floats(0, 9), st.integers(1, 60), st.integers(0, 3)), min_size=2, max_size=16
    )
)
def test_the_longest_waits_for_few(wishes: list[tuple[float, int, int]]) -> None:
    """Under any arrivals and ends, no request is overtaken by one that arrived after the bound."""
    lab = Lab(max_bs=1, shape=ONE._replace(ordering=ShortestFirst))
    lengths = {str(number): length for number, (_, length, _) in enumerate(wishes)}
    lab.pool.predictor = Said(lengths)
    arrivals: dict[str, float] = {}
    began: list[str] = []
    for number, (gap, _, steps) in enumerate(wishes):
        lab.now += gap
        lab.add(str(number), 1, 1)
        arrivals[str(number)] = lab.now
        for _ in range(steps):
            lab.step()
    lab.run()
    for plan in lab.executor.plans:
        began += [member.request_id for member in plan.members if member.request_id not in began]
    assert sorted(began) == sorted(arrivals)
    for place, request_id in enumerate(began):
        for earlier in began[:place]:
            if arrivals[earlier] > arrivals[request_id]:
                most = SECONDS_PER_TOKEN * (lengths[request_id] - lengths[earlier])
                assert (
                    arrivals[earlier] - arrivals[request_id]
                    <= most
                    <= SECONDS_PER_TOKEN * (lengths[request_id] - 1)
                )


@pytest.mark.parametrize("name", ORDERINGS)
def test_thousands_wait(name: str) -> None:
    """A selection reads few of the requests; aborted ones leave nothing behind."""
    queue = ordering_kind(name)().queue()
    pool = RequestPool(KVManager((100,), 4, 8), vocab_size=VOCAB, max_model_len=64)
    params = SamplingParams(max_tokens=4)
    wishes = [
        Urgency(number % 7, f"tenant {number % 1000}", 1.0 + number % 13)
        for number in range(10_000)
    ]
    for number, wish in enumerate(wishes):
        pool.add_request(str(number), [1], params, seed=0, arrival=number / 1000, urgency=wish)
    first = next(iter(queue.waiting(pool)))
    start = time.process_time()
    for _ in range(2000):
        assert next(iter(queue.waiting(pool))) is first, "reading removes nothing"
    assert time.process_time() - start < 2, "about ten seconds if each read all requests"
    for number in range(10_000):
        pool.abort(str(number))
    last = pool.add_request("last", [1], params, seed=0, arrival=11.0)
    assert list(queue.waiting(pool)) == [last]


@pytest.mark.parametrize("name", ["priority", "deadline", "fair"])
def test_aborted_requests_at_the_end_of_the_queue_are_dropped(name: str) -> None:
    """Under load the end of the queue may never be reached, and its requests hold prompts."""
    queue = ordering_kind(name)().queue()
    pool = RequestPool(KVManager((100,), 4, 8), vocab_size=VOCAB, max_model_len=64)
    params = SamplingParams(max_tokens=4)
    first = pool.add_request(
        "first", [1], params, seed=0, arrival=0.0, urgency=Urgency(-1, "ann", 1.0)
    )
    gc.freeze()  # objects of other tests need not be visited
    for number in range(1000):
        pool.add_request(str(number), [1], params, seed=0, arrival=1.0, urgency=Urgency(1, "bob"))
        assert next(iter(queue.waiting(pool))) is first
        pool.abort(str(number))
        pool.deliver(lambda request: True, 2.0)
    assert num_requests() < 200
    gc.unfreeze()


def num_requests() -> int:
    """The number of requests that were made since `gc.freeze` and are still referenced."""
    gc.collect()
    return sum(isinstance(one, Request) for one in gc.get_objects())
