"""Sums of latencies of a few requests, in iterations: under a policy, the least one, and the best of a search."""

import random
from collections.abc import Sequence

from lab.policies.mc_sf import McSf
from lab.shelf.virtual import Call, Devices, on_protocol, serve_calls
from orca_jax.policy import Policy
from orca_jax.sim.cost import LinearCost

CHANGES = 300
"""Changes of the order that a search tries."""


def by_policy(memory: int, calls: Sequence[Call], policy: Policy | None = None) -> float:
    """The sum of the latencies under MC-SF, or under another policy."""
    chosen = policy or McSf(1)
    devices = Devices(LinearCost(1.0, 0.0, 0.0), memory, 1, len(calls), memory, longest=memory + 1)
    outcome = serve_calls(lambda limits: on_protocol(chosen, limits), calls, devices)
    assert not outcome.evictions, "memory was short"
    return sum([service.end - service.arrival for service in outcome.services])


def optimum(memory: int, calls: Sequence[Call], known: float) -> float:
    """The least sum of the latencies, proven.

    Args:
        memory: tokens.
        calls: the requests.
        known: the sum of a schedule. In a better one no request waits longer than this exceeds the sum of the outputs.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    longest_wait = round(known) - sum([call.num_generated for call in calls])
    horizon = max([int(call.arrival) + call.num_generated for call in calls]) + longest_wait
    cost = list[float]()
    starts = list[tuple[int, int]]()  # request and column
    held = list[tuple[int, int, int]]()  # iteration, column and tokens
    for index, call in enumerate(calls):
        for start in range(int(call.arrival), int(call.arrival) + longest_wait + 1):
            column = len(cost)
            cost.append(start + call.num_generated - call.arrival)
            starts.append((index, column))
            held += [(start + j, column, call.num_prompt + j) for j in range(call.num_generated)]
    times, where, tokens = np.array(held).T
    size = len(cost)
    memory_of = coo_array((tokens, (times, where)), shape=(horizon, size)).tocsr()
    once = coo_array((np.ones(len(starts)), np.array(starts).T), shape=(len(calls), size)).tocsr()
    limits = [LinearConstraint(memory_of, -np.inf, memory), LinearConstraint(once, 1, 1)]
    found = milp(np.array(cost), integrality=np.ones(size), bounds=Bounds(0, 1), constraints=limits)
    assert found.status == 0, found.message
    return float(found.fun)


def best_found(memory: int, calls: Sequence[Call]) -> float:
    """The least sum of the latencies of some schedules of requests that arrive at once."""
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view

    def total(order: Sequence[int]) -> int:
        """The sum if each request in turn begins as early as its tokens fit beside those before it."""
        held = np.zeros(sum([call.num_generated for call in calls]), dtype=int)
        found = 0
        for index in order:
            size = calls[index].num_generated
            tokens = calls[index].num_prompt + np.arange(size)
            start = int(
                np.argmax(np.all(sliding_window_view(held, size) + tokens <= memory, axis=1))
            )
            held[start : start + size] += tokens
            found += start + size
        return found

    dice = random.Random(0)
    order = sorted(range(len(calls)), key=lambda index: calls[index].num_generated)
    best = total(order)
    for _ in range(CHANGES):
        other = list(order)
        other.insert(dice.randrange(len(other)), other.pop(dice.randrange(len(other))))
        if (found := total(other)) <= best:
            best = found
            order = other
    return best
