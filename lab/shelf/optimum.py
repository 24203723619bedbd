"""MC-SF beside the optimum in hindsight (Jaillet et al., arXiv 2502.07115, sections 3 and 5.1).

Time is counted in iterations of one second. A request arrives in a whole second, holds s + j - 1 tokens in the
iteration of its j-th token, and ends with its o-th. The integer programme of the paper's section 3 chooses the first
iteration of each request so that the sum of all latencies is least; an optimum without interruptions is the best of
all schedules here, as in the paper. HiGHS solves it (`scipy.optimize.milp`).

The paper draws memory from 30 to 50 tokens, prompts from 1 to 5, outputs from 1 to the memory less the prompt, and
either 40 to 60 requests at once or Poisson arrivals over 40 to 60 seconds. Here are fewer requests, 4 to 8, and a
memory of 15 to 25 tokens, so that each optimum is proven in a moment; in the online form they arrive at a rate of one
each second.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from lab.paper.effort import Effort
from lab.policies.mc_sf import McSf
from lab.reproduce.rows import Row
from lab.shelf.virtual import Call, Devices, on_protocol, simulate
from orca_jax.sim.cost import LinearCost

INSTANCES = 200
LIMIT = 1.02
MEMORY, PROMPTS, REQUESTS = (15, 25), (1, 5), (4, 8)
PAPER = {"at once": 1.005, "online": 1.047}


def instance(number: int, is_online: bool) -> tuple[int, list[Call]]:
    """Tokens of memory, and the requests."""
    dice = random.Random(f"mc-sf-{number}-{is_online}")
    memory, calls, at = dice.randint(*MEMORY), list[Call](), 0.0
    for _ in range(dice.randint(*REQUESTS)):
        num_prompt = dice.randint(*PROMPTS)
        calls.append(Call(float(int(at)), num_prompt, dice.randint(1, memory - num_prompt)))
        at += dice.expovariate(1.0) if is_online else 0.0
    return memory, calls


def by_policy(memory: int, calls: Sequence[Call]) -> float:
    """The sum of the latencies under MC-SF."""
    devices = Devices(LinearCost(1.0, 0.0, 0.0), memory, 1, len(calls), memory, longest=memory + 1)
    outcome = simulate(lambda limits: on_protocol(McSf(1), limits), calls, devices)
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
    cost, starts = list[float](), list[tuple[int, int]]()  # request and column
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


def ratio(number: int, is_online: bool) -> float:
    """MC-SF's sum of latencies by the least one."""
    memory, calls = instance(number, is_online)
    found = by_policy(memory, calls)
    return found / optimum(memory, calls, found)


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The mean and the worst ratio over all instances: a tenth of them in the quick form."""
    count = INSTANCES if effort.requests >= 2000 else INSTANCES // 10
    found, rows = dict[str, Any](), list[Row]()
    for name, paper in PAPER.items():
        ratios = effort.map(ratio, range(count), [name == "online"] * count)
        mean = statistics.fmean(ratios)
        found[name] = {"mean": mean, "worst": max(ratios), "instances": count}
        text = f"MC-SF's sum of latencies by the optimum, {name}: mean of {count} instances"
        rows.append(Row(f"mc_sf.{name}", text, mean, paper, error=mean - 1, limit=LIMIT - 1))
    return found, rows
