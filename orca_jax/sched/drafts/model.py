"""Proposals by a small model, the draft model, with an executor and a KV cache of its own.

Its draws have the seeds and positions of the requests, and so the same random numbers as the draws of the large model:
similar distributions then give the same token, also with a temperature.

Each row of the draft model has its own pages for the longest request, so nothing is allocated while serving. The keys
and values of a request follow its tokens: those of wrong proposals are overwritten, and those of tokens that the draft
model has not seen yet are computed with the next proposal, at first the whole prompt.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

from orca_jax.sched.drafts.proposer import Acceptance, Chance, Wish
from orca_jax.sched.request import Request
from orca_jax.values.step import Executor, Handle, Member, RowSampling, StepPlan

_PRIOR = 0.6  # acceptance before the first proposal
_NEWEST = 0.2  # weight of the newest measurement
_USUAL_UNSEEN = 2  # tokens that the draft model has not seen after a proposal, at most


class _DraftRow:
    """A request in the draft model."""

    def __init__(self, row: int, prior: float) -> None:
        self.row = row
        self.acceptance = Acceptance(prior)
        self.num_computed = 0  # tokens with keys and values
        self.drafts: Sequence[int] = ()  # the last proposal, after `num_computed` tokens
        self.is_new = True  # the executor does not know the row's holder


class ModelProposer:
    """Proposes the draws of a draft model.

    Args:
        executor: the executor of the draft model, for this proposer alone.
        num_rows: rows of the executor, at least as many as requests of a call of `propose`.
        pages_per_row: pages of the longest request.
        count: the most ids of a proposal.
        round_seconds: expected time of an iteration of the draft model, until it is measured.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        executor: Executor,
        num_rows: int,
        pages_per_row: int,
        count: int,
        round_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._pages_per_row = pages_per_row
        self._count = count
        self._clock = clock
        self._seconds = round_seconds
        self._is_measured = False
        self._overall = Acceptance(_PRIOR)
        self._by_use: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(num_rows)
        )  # the least recently used row first
        self._holders: WeakValueDictionary[int, Request] = WeakValueDictionary()
        self._rows: WeakKeyDictionary[Request, _DraftRow] = WeakKeyDictionary()
        self._num_plans = 0

    @property
    def seconds(self) -> float:
        """Measured time of an iteration of the draft model."""
        return self._seconds

    def chance(self, request: Request) -> Chance:
        """The share of accepted proposals. It drifts to its prior while there are none, so they are tried again."""
        held = self._rows.get(request)
        acceptance = self._overall if held is None else held.acceptance
        if held is None or not held.drafts:
            acceptance.relax(_PRIOR)
        return Chance(1.0, acceptance.rate)

    def ready(self, request: Request) -> int:
        """All ids of a proposal, always."""
        return self._count

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """Run the draft model once for each place of the longest proposal, without waiting between."""
        if not wishes:
            return []
        start = self._clock()
        rows = self._rows_of([wish.request for wish in wishes])
        unseen = max(
            [
                wish.request.num_tokens - row.num_computed
                for wish, row in zip(wishes, rows, strict=True)
            ]
        )
        handles: list[tuple[Handle, list[int]]] = []
        for place in range(max([wish.number for wish in wishes])):
            drafting = [index for index, wish in enumerate(wishes) if wish.number > place]
            members = tuple(
                [self._member(wishes[index].request, rows[index], place) for index in drafting]
            )
            handles.append((self._executor.submit(StepPlan(self._num_plans, members)), drafting))
            self._num_plans += 1
        proposals: list[list[int]] = [[] for _ in wishes]
        broken = set[int]()
        for handle, drafting in handles:
            for index, result in zip(drafting, self._executor.collect(handle).members, strict=True):
                if not result.is_finite:
                    broken.add(index)
                if index not in broken:
                    proposals[index] += result.run or ()
        self._executor.rest()
        for wish, row, drafts in zip(wishes, rows, proposals, strict=True):
            row.num_computed = wish.request.num_tokens
            row.drafts = drafts
        if unseen <= _USUAL_UNSEEN:
            self._measure((self._clock() - start) / len(handles))
        return list(proposals)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the accepted ids, for the request and for those to come."""
        tests = min(num_accepted + 1, num_drafts)
        self._overall.add_tests(num_accepted, tests)
        held = self._rows.get(request)
        if held is not None:
            held.acceptance.add_tests(num_accepted, tests)

    def close(self) -> None:
        """Free the memory of the draft model."""
        self._executor.close()

    def _member(self, request: Request, held: _DraftRow, place: int) -> Member:
        """The work of a request for the id at this place: all unseen tokens, and then the last draw each time."""
        pages = self._pages_per_row
        if place:
            start = request.num_tokens + place - 1
            return Member(request.request_id, held.row, start, (), True, True, pages)
        ids = request.ids_from(held.num_computed, request.num_tokens - held.num_computed)
        member = Member(request.request_id, held.row, held.num_computed, ids, True, False, pages)
        if held.is_new:
            held.is_new = False
            own = tuple(range(held.row * pages, (held.row + 1) * pages))
            sampling = RowSampling(request.params, request.seed, len(request.prompt_ids))
            member = member._replace(num_old_blocks=0, new_blocks=(own,), sampling=sampling)
        return member

    def _rows_of(self, requests: Sequence[Request]) -> list[_DraftRow]:
        """The rows of requests. The least recently used rows change their holders."""
        held = {row.row for request in requests if (row := self._rows.get(request)) is not None}
        free = iter([row for row in self._by_use if row not in held])
        rows = []
        for request in requests:
            row = self._rows.get(request)
            if row is None:
                row = self._rows[request] = _DraftRow(next(free), self._overall.rate)
                before = self._holders.get(row.row)
                if before is not None and self._rows.get(before) is not None:
                    del self._rows[before]
                self._holders[row.row] = request
            rows.append(row)
            self._by_use.move_to_end(row.row)
            # Of the last proposal, the keys and values of accepted ids count; its last id was drawn and not computed.
            following = request.ids_from(row.num_computed, len(row.drafts))
            for draft, token in zip(row.drafts[:-1], following, strict=False):
                if draft != token:
                    break
                row.num_computed += 1
            # the newest token gives the first draw
            row.num_computed = min(row.num_computed, request.num_tokens - 1)
            row.drafts = ()
        return rows

    def _measure(self, seconds: float) -> None:
        self._seconds += (_NEWEST if self._is_measured else 1.0) * (seconds - self._seconds)
        self._is_measured = True
