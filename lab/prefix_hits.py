"""Computes the prompt tokens that a prefix cache could save, from the prompts of a workload alone.

This code is independent of the engine's accounting (`sched/request.py`, `sched/pages.py`), which it is compared with:
pages are identified by nested numbers instead of digests, and their ages are kept in a heap.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import NamedTuple

from orca_jax.bench.workload.generate import WorkloadRequest
from orca_jax.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.step import ExecutorStats, StepPlan


def page_names(workload: Sequence[WorkloadRequest], page_size: int) -> list[list[int]]:
    """Number the full pages of each prompt; two pages have the same number if all tokens up to their ends are equal."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    result = []
    for request in workload:
        chain: list[int] = []
        for end in range(page_size, len(request.prompt_ids) + 1, page_size):
            page = (chain[-1] if chain else -1, request.prompt_ids[end - page_size : end])
            chain.append(names.setdefault(page, len(names)))
        result.append(chain)
    return result


def possible_hits(workload: Sequence[WorkloadRequest], page_size: int, num_pages: int) -> int:
    """Count the prompt tokens that requests find in an LRU cache of pages when they run one after another.

    A request computes at least the last token of its prompt. While it runs, it holds pages for all tokens except the
    last generated one. After its end its full pages can be found; pages at its end count as older than those before.
    """
    unique = count(-1, -1)  # pages of generated tokens, which no later request finds
    ages: dict[int, tuple[int, int]] = {}  # page -> (last request that used it, minus its position there)
    oldest: list[tuple[tuple[int, int], int]] = []  # heap of (age, page); it also holds outdated entries
    hits = 0
    for turn, (request, chain) in enumerate(zip(workload, page_names(workload, page_size), strict=True)):
        num_found = 0
        while num_found < (len(request.prompt_ids) - 1) // page_size and chain[num_found] in ages:
            num_found += 1
        hits += num_found * page_size
        for page in chain[:num_found]:
            del ages[page]
        num_tokens = len(request.prompt_ids) + request.num_output - 1
        num_held = -(-num_tokens // page_size)
        while len(ages) + num_held > num_pages:
            age, page = heappop(oldest)
            if ages.get(page) == age:
                del ages[page]
        num_generated = num_tokens // page_size - len(chain)
        for place, page in enumerate([*chain, *(next(unique) for _ in range(num_generated))]):
            ages[page] = (turn, -place)
            heappush(oldest, (ages[page], page))
    return hits


class Admissions(Observer):
    """Records the begin of each request, its cache hits, and the running requests. Request ids end in "-<index>"."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, list[str]]] = []  # (index, tokens found, ids of the running requests)

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """Record new requests in the order of admission."""
        for member in plan.members:
            if member.sampling is not None:
                found = pool.running[member.request_id].num_cached
                self.begun.append((_index(member.request_id), found, list(pool.running)))


class Missed(NamedTuple):
    """Prompt tokens computed although an earlier request had them too, by reason."""

    in_flight: int  # a request that was still running had them
    evicted: int  # their pages, or pages before them, were evicted


def count_missed(workload: Sequence[WorkloadRequest], page_size: int, admissions: Admissions) -> Missed:
    """Count the missed tokens by reason. Together with the hits, these are all tokens shared with earlier requests."""
    chains = page_names(workload, page_size)
    done: set[int] = set()  # requests
    seen: set[int] = set()  # pages
    in_flight = evicted = 0
    for index, found, running in admissions.begun:
        if index in done:  # it began before, and was preempted
            continue
        held = {page for name in running if _index(name) in done for page in chains[_index(name)]}
        most = (len(workload[index].prompt_ids) - 1) // page_size
        missed = list(takewhile(seen.__contains__, chains[index][found // page_size : most]))
        in_flight += page_size * sum([page in held for page in missed])
        evicted += page_size * sum([page not in held for page in missed])
        done.add(index)
        seen.update(chains[index])
    return Missed(in_flight, evicted)


def _index(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
