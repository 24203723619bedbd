"""Sorted-F beside the optimum in hindsight, and on a backlog where shortest first fails (arXiv 2508.06133).

All requests wait at the beginning, as in the paper, and prompts take up to half of the memory. On small instances
Sorted-F tries all sets of requests, and the integer programme of MC-SF's instances gives the optimum.

The paper proves that the sum of latencies is within a constant of the optimum, and that shortest first is not. A
backlog shows both. For a memory of M tokens, the root of M requests have prompts of M - 1 tokens and generate one
token, and M requests have prompts of one token and generate two. Shortest first serves the large ones first, one
after another. Its sum by Sorted-F's grows with M, while Sorted-F's stays near a lower bound: the large requests
alone, and the small ones as if memory could be cut as one likes.
"""

import random
import statistics
from math import isqrt
from typing import Any

from lab.paper.effort import Effort
from lab.policies.mc_sf import McSf, SortedF
from lab.reproduce.rows import Row
from lab.shelf.hindsight import by_policy, optimum
from lab.shelf.virtual import Call

INSTANCES = 200
MEMORIES = (64, 256, 1024)
REQUESTS = (4, 7)
MEMORY = (12, 20)


def instance(number: int) -> tuple[int, list[Call]]:
    """Tokens of memory, and a few requests with prompts of very different lengths."""
    dice = random.Random(f"sorted-f-{number}")
    memory = dice.randint(*MEMORY)
    calls = list[Call]()
    for _ in range(dice.randint(*REQUESTS)):
        num_prompt = dice.randint(1, memory // 2)
        calls.append(Call(0.0, num_prompt, dice.randint(1, memory - num_prompt)))
    return memory, calls


def ratios(number: int) -> tuple[float, float]:
    """Sorted-F's sum of latencies by the least one, and MC-SF's by Sorted-F's."""
    memory, calls = instance(number)
    found = by_policy(memory, calls, SortedF(1))
    shortest = by_policy(memory, calls, McSf(1))
    return found / optimum(memory, calls, min(found, shortest)), shortest / found


def backlog(memory: int) -> list[Call]:
    """A few large requests that end at once, and many small ones that take one iteration more."""
    large = [Call(0.0, memory - 1, 1) for _ in range(isqrt(memory))]
    return large + [Call(0.0, 1, 2) for _ in range(memory)]


def lower_bound(memory: int) -> float:
    """A sum of latencies of the backlog that no schedule is below."""
    count = isqrt(memory)
    large = count * (count + 1) / 2
    small = [max(2.0, 3 * number / memory) for number in range(1, memory + 1)]
    return large + sum(small)


def on_backlog(memory: int) -> tuple[float, float]:
    """Sorted-F's sum by the lower bound, and MC-SF's by Sorted-F's."""
    calls = backlog(memory)
    found = by_policy(memory, calls, SortedF(1))
    return found / lower_bound(memory), by_policy(memory, calls, McSf(1)) / found


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The ratios over all instances, a tenth of them in the quick form, and on backlogs."""
    count = INSTANCES if effort.requests >= 2000 else INSTANCES // 10
    small = effort.map(ratios, range(count))
    to_least = [ratio for ratio, _ in small]
    gain = statistics.fmean([gain for _, gain in small])
    large = effort.map(on_backlog, MEMORIES)
    bounds = [ratio for ratio, _ in large]
    gains = [gain for _, gain in large]
    found = {
        "sorted_f": {"mean": statistics.fmean(to_least), "worst": max(to_least)},
        "backlogs": dict(zip(map(str, MEMORIES), large, strict=True)),
    }
    of = f"mean of {count} instances"
    ends = f"at {MEMORIES[-1]:,} tokens of memory by that at {MEMORIES[0]}"
    rows = [
        Row(
            "mc_sf.sorted_f",
            f"Sorted-F's sum of latencies by the optimum, at once: {of}; the worst is {max(to_least):.3g}",
            statistics.fmean(to_least),
            "a constant",
        ),
        Row(
            "mc_sf.sorted_f.gain",
            f"MC-SF's sum by Sorted-F's on them: {of}",
            gain,
            "> 1",
            holds=gain > 1,
        ),
        Row(
            "mc_sf.sorted_f.backlog",
            f"Sorted-F's sum by a lower bound on a backlog, {ends}",
            bounds[-1] / bounds[0],
            "<= 1 (a constant)",
            holds=bounds[-1] <= bounds[0],
        ),
        Row(
            "mc_sf.sorted_f.shortest",
            f"MC-SF's sum by Sorted-F's on a backlog, {ends}",
            gains[-1] / gains[0],
            "> 1 (no constant)",
            holds=gains[-1] > gains[0],
        ),
    ]
    return found, rows
