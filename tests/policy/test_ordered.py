"""The policy of an order makes the plans of the scheduler `chunked` of the package with the same order."""

import random
from typing import Any, ClassVar

import pytest

from orca_jax.policy import API, RequestView
from orca_jax.policy.ordered import Ordered
from orca_jax.policy.scheduler import PolicyScheduler
from tests.covering import slow
from tests.sched.lab import Lab, Shape


class ByArrival:
    """The order of arrival."""

    api: ClassVar[int] = API
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        return ()


def plans_of(seed: int, on_protocol: bool) -> list[Any]:
    """The batches of a random scenario under one of both schedulers, and the preemptions."""
    rng = random.Random(seed)
    stages = rng.choice([1, 1, 1, 2])
    shape = Shape(
        budget=rng.choice([6, 8, 16]),
        depth=stages + rng.randrange(3 if stages == 1 else 2),
        watermark=rng.choice([0, 1]),
        num_pages=rng.choice([None, 10, 14]),
        stages=stages,
        check_in_interval=1,
    )
    lab = Lab("chunked", max_bs=rng.randint(1, 5), page_size=4, max_model_len=40, shape=shape)
    if on_protocol:
        lab.scheduler.inner = PolicyScheduler(
            Ordered(ByArrival(), shape.watermark),
            "chunked",
            max_bs=lab.max_bs,
            token_budget=shape.budget,
            num_rows=lab.max_bs * stages,
            n_workers=shape.depth,
            num_stages=stages,
        )
    lengths = rng.sample(range(1, 24), 12)  # equal prompts of one selection would be computed twice
    for number, length in enumerate(lengths):
        lab.add(f"r{number}", length, rng.randint(1, 14))
        for _ in range(rng.randrange(4)):
            lab.step()
        if rng.random() < 0.1:
            lab.engine.abort(f"r{rng.randrange(number + 1)}")
    lab.run()
    return [lab.batches, lab.pool.num_preemptions, lab.tokens, lab.scheduler]


# The last one drops copies of pages.
@pytest.mark.parametrize("first", [0, *(slow(each) for each in (25, 50, 75)), 175])
def test_plans_are_those_of_the_package(first: int) -> None:
    preemptions = 0
    for seed in range(first, first + 25):
        *expected, _ = plans_of(seed, on_protocol=False)
        *found, scheduler = plans_of(seed, on_protocol=True)
        assert found == expected, f"scenario {seed}"
        assert scheduler.inner.guard.num_overrules == 0, f"scenario {seed}"
        preemptions += found[1]
    assert preemptions, "no scenario lacks pages"
