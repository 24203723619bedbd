"""What a trace allows: how many prompt tokens a cache of pages could save, told from the prompts alone.

Written apart from the engine's own accounting (`sched/prefix.py`, `sched/pages.py`), which it is compared with: pages
are named by nested numbers instead of digests, and their age is a number in a heap.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import NamedTuple

from orca_jax.bench.workload.generate import WorkloadRequest
from orca_jax.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.step import ExecutorStats, StepPlan


def page_names(trace: Sequence[WorkloadRequest], page_size: int) -> list[list[int]]:
    """For each request, a number for each full page of its prompt: equal where all tokens up to its end are."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    result = []
    for request in trace:
        chain: list[int] = []
        for end in range(page_size, len(request.prompt_ids) + 1, page_size):
            page = (chain[-1] if chain else -1, request.prompt_ids[end - page_size : end])
            chain.append(names.setdefault(page, len(names)))
        result.append(chain)
    return result


def possible_hits(trace: Sequence[WorkloadRequest], page_size: int, num_pages: int) -> int:
    """Prompt tokens found by requests that run one after another, with the least recently used page given up first.

    A request computes at least its prompt's last token. While it runs it holds pages for all but the last token that
    it generates; when it ends, every full one may be found, and is the older the later it stands in the request.
    """
    unique = count(-1, -1)  # generated pages, which nobody asks for
    ages: dict[int, tuple[int, int]] = {}  # page -> (who used it last, minus its place)
    oldest: list[tuple[tuple[int, int], int]] = []  # heap of the same, with entries that are out of date
    hits = 0
    for turn, (request, chain) in enumerate(zip(trace, page_names(trace, page_size), strict=True)):
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
    """Writes down who began when, what each found, and who ran then. Requests are named "<anything>-<index>"."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, list[str]]] = []  # (index, tokens found, names of those that ran)

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """Note the newcomers, in the order in which they were admitted."""
        for member in plan.members:
            if member.sampling is not None:
                found = pool.running[member.request_id].num_cached
                self.begun.append((_index(member.request_id), found, list(pool.running)))


class Missed(NamedTuple):
    """Prompt tokens that somebody before had as well, and that were computed all the same, by reason."""

    in_flight: int  # another one that still ran had them
    evicted: int  # their memory, or that of tokens before them, was needed


def count_missed(trace: Sequence[WorkloadRequest], page_size: int, admissions: Admissions) -> Missed:
    """Why requests found no more than they did; with what they found, this makes all that was ever there to find."""
    chains = page_names(trace, page_size)
    done: set[int] = set()  # requests
    seen: set[int] = set()  # pages
    in_flight = evicted = 0
    for index, found, running in admissions.begun:
        if index in done:  # it had been preempted
            continue
        held = {page for name in running if _index(name) in done for page in chains[_index(name)]}
        most = (len(trace[index].prompt_ids) - 1) // page_size
        missed = list(takewhile(seen.__contains__, chains[index][found // page_size : most]))
        in_flight += page_size * sum([page in held for page in missed])
        evicted += page_size * sum([page not in held for page in missed])
        done.add(index)
        seen.update(chains[index])
    return Missed(in_flight, evicted)


def _index(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
