"""Computes the prompt tokens that a prefix cache could save, from the prompts of a workload alone.

This code is independent of the engine's accounting (`sched/prefixes/`), which it is compared with:
pages are identified by nested numbers instead of digests, and their ages are kept in a heap.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.step import ExecutorStats, StepPlan

WORTH_A_COPY = 16  # tokens that a copy must save, unless it saves all of a prompt but one


class _Cached:
    """The pages of an LRU cache."""

    def __init__(self) -> None:
        # by the page before it (-1: none) and its ids
        self.names: dict[tuple[int, tuple[int, ...]], int] = {}
        self.following: defaultdict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        # page -> (last request that used it, minus its position there)
        self.ages: dict[int, tuple[int, int]] = {}
        # heap of (age, page); it also holds outdated entries
        self._oldest: list[tuple[tuple[int, int], int]] = []

    def name(self, parent: int, ids: tuple[int, ...]) -> int:
        """The number of a page; equal pages after the same one have the same number."""
        if (parent, ids) not in self.names:
            self.following[parent].append((len(self.names), ids))
        return self.names.setdefault((parent, ids), len(self.names))

    def use(self, page: int, turn: int, place: int) -> None:
        """Add a page, or make it young again."""
        self.ages[page] = turn, -place
        heappush(self._oldest, (self.ages[page], page))

    def shrink(self, most: int) -> None:
        """Evict the oldest pages until there are at most `most`."""
        while len(self.ages) > most:
            age, page = heappop(self._oldest)
            if self.ages.get(page) == age:
                del self.ages[page]

    def longest(self, parent: int, ids: tuple[int, ...]) -> tuple[int, int]:
        """The most ids in common with a page after this one, and the page."""
        found = [
            (num_common(ids, other), page)
            for page, other in self.following[parent]
            if page in self.ages
        ]
        return max(found, default=(0, -1))


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal ids at the beginning of both."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def hits_in_order(workload: Sequence[WorkloadRequest], page_size: int, num_pages: int) -> list[int]:
    """The prompt tokens that each request finds in an LRU cache of pages when they run one after another.

    A request computes at least the last token of its prompt. While it runs, it holds pages for all tokens except the
    last generated one. After its end they can be found, also the last one, which may be in part. Pages at its end count
    as older than those before. After its full pages a request may copy the beginning of another one.
    """
    unique = count(-1, -1)  # generated ids, which no later request has
    cached = _Cached()
    hits = []
    for turn, request in enumerate(workload):
        ids = (*request.prompt_ids, *(next(unique) for _ in range(request.num_output - 1)))
        most = len(request.prompt_ids) - 1
        parent = -1
        num_found = 0
        while (num_found + 1) * page_size <= most:
            page = cached.names.get(
                (parent, ids[num_found * page_size : (num_found + 1) * page_size]), -1
            )
            if page not in cached.ages:
                break
            del cached.ages[page]  # held
            parent = page
            num_found += 1
        start = num_found * page_size
        copied, source = cached.longest(parent, ids[start : min(most, start + page_size)])
        if copied < WORTH_A_COPY and start + copied < most:
            copied = 0
        if copied:
            cached.use(source, turn, len(ids))
        hits.append(start + copied)
        cached.shrink(num_pages - ceil_div(len(ids), page_size))
        before = -1
        for place in range(0, len(ids), page_size):
            before = cached.name(before, ids[place : place + page_size])
            cached.use(before, turn, place)
    return hits


def possible_hits(workload: Sequence[WorkloadRequest], page_size: int, num_pages: int) -> int:
    """The sum of `hits_in_order`."""
    return sum(hits_in_order(workload, page_size, num_pages))


class Admissions(Observer):
    """Records the begin of each request, its cache hits, and the running requests. Request ids end in "-<index>"."""

    def __init__(self) -> None:
        # (index, tokens found, ids of the running requests)
        self.begun: list[tuple[int, int, list[str]]] = []

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


def count_missed(
    workload: Sequence[WorkloadRequest], page_size: int, admissions: Admissions
) -> Missed:
    """Count the missed tokens by reason. Together with the hits, these are all tokens that a large cache would have."""
    possible = hits_in_order(
        workload, page_size, sum(len(each.prompt_ids) + each.num_output for each in workload)
    )
    done: set[int] = set()  # requests
    in_flight = evicted = 0
    for index, found, running in admissions.begun:
        if index in done:  # it began before, and was preempted
            continue
        prompts = [workload[_index(name)].prompt_ids for name in running if _index(name) in done]
        most = max(
            [num_common(workload[index].prompt_ids, prompt) for prompt in prompts], default=0
        )
        held = max(0, min(possible[index], most) - found)
        in_flight += held
        evicted += possible[index] - found - held
        done.add(index)
    return Missed(in_flight, evicted)


def _index(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
