"""The protocol of a policy: a scheduler for comparison, and its place on the simulated devices.

A new policy is a module in this folder and a row in `POLICIES` of `lab/baselines/__init__.py`. Its systems then have a
name such as `orca(32)` in every table.
"""

from collections.abc import Callable
from typing import NamedTuple

from lab.paper.gpt import EngineCost
from orca_jax.sched.scheduler import KnownScheduler
from orca_jax.sim.cost import IterationCost


class Setting(NamedTuple):
    """The sizes of a system, and its devices."""

    max_bs: int
    mbs: int  # of a microbatch; 0: the system has none
    in_flight: int  # iterations
    num_stages: int
    token_budget: int


def same_cost(cost: EngineCost, setting: Setting, scheduler: KnownScheduler) -> IterationCost:
    """The cost of ORCA's engine."""
    return cost


class Policy(NamedTuple):
    """A kind of system.

    Attributes:
        make: makes its scheduler.
        cost: changes the cost of ORCA's engine, for this scheduler.
        preallocates: True if each request of `max_bs` has the memory of the longest one.
        has_all_rows: True if as many requests may be admitted as the memory holds, not `max_bs` for each iteration.
        waits: True if a batch waits for its longest member, so that a request takes many iterations.
        is_paper_baseline: True for the paper's FasterTransformer, whose engine is slower in a pipeline.
    """

    make: Callable[[Setting], KnownScheduler]
    cost: Callable[[EngineCost, Setting, KnownScheduler], IterationCost] = same_cost
    preallocates: bool = False
    has_all_rows: bool = False
    waits: bool = False
    is_paper_baseline: bool = False
