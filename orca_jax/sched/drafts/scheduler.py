"""Speculation around any scheduler: it adds proposals to the selected increments, as far as they pay off.

The model verifies the proposals of all requests in one iteration. A drawn token depends on logits, seed and position
alone. So a proposal is accepted if it equals the draw at its position, and the tokens of a request are those without
speculation, greedy or sampled.

A proposal needs the newest token. So while speculation is on, no iteration is selected that overlaps another one
(`--overlap`). It is on only as long as that loss is smaller than the gain.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.sched.blocks import not_below_zero
from orca_jax.sched.drafts.gain import NO_GAIN, IterationTimes, Share, best_share
from orca_jax.sched.drafts.proposer import Chance, Proposer, Wish
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, KnownScheduler, Selection
from orca_jax.values.cache_spec import ceil_div

CHECK_EVERY = 8  # iterations between two decisions about being on
TURN_ON, TURN_OFF = 1.1, 1.03  # expected tokens per second, relative to those without speculation
SAMPLED = 8  # requests that stand for all in this decision; an index of n-grams costs the host time
# tokens of an iteration, relative to those without: enough to measure iterations with proposals
WORTH_A_TRY = 1.5
TRY_FOR = 3  # iterations; the first one has no proposals yet
TRY_AFTER = 256  # iterations between the first two tries; then twice as many, and so on
# a try may take longer than iterations without proposals: by so many of them,
TRY_COST = 2.0
TRY_SHARE = 0.02  # and by this share of those since the last try
# iterations after which it is off for a moment, to measure iterations without it
MEASURE_EVERY = 256


@dataclass(frozen=True)
class DraftLimits:
    """Bounds of proposals.

    Attributes:
        per_request: most ids of a proposal.
        per_iteration: most proposed ids of an iteration.
        max_bs: no proposals in iterations of more requests than this.
        with_extras: most proposed ids beside requests for the full sampler, which has fewer places.
        max_tokens: most tokens of an iteration, proposals included.
    """

    per_request: int
    per_iteration: int
    max_bs: int
    with_extras: int
    max_tokens: int


class _OpenMeasurement(NamedTuple):
    """An iteration of increments, to be measured."""

    at: float  # seconds, when it was selected
    num_tokens: int
    waits: bool
    members: frozenset[str]
    proposing: float  # seconds of it for proposals


class SpeculativeScheduler:
    """Delegates to another scheduler, and adds proposals to its selections.

    Args:
        inner: selects requests.
        proposer: makes proposals.
        limits: bounds of the number of proposals.
        launches: seconds of a launch of each bucket; empty: proposals cost nothing.
        overlaps: True if `inner` selects an iteration while the one before runs on the same devices.
        charge: counts proposed ids for the ordering of `inner`, if it has one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        inner: KnownScheduler,
        proposer: Proposer,
        limits: DraftLimits,
        launches: Mapping[int, float],
        *,
        overlaps: bool = False,
        charge: Callable[[Request, int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner = inner
        self._overlaps = overlaps
        self.n_workers = inner.n_workers
        self.is_on = False
        self.times = IterationTimes(launches)
        self._proposer = proposer
        self._limits = limits
        self._charge = charge
        self._clock = clock
        self._last: _OpenMeasurement | None = None
        self._kind = (False, False)  # of the last iteration: on, and all its requests generate
        self._until_check = 1
        self._num_on = 0  # iterations since it was turned on
        self._is_trying = False  # to be measured, iterations have all proposals
        self._pause = 0
        self._since_try = 0  # iterations
        # proposals in flight: request, its tokens, their number
        self._sent: dict[str, tuple[Request, int, int]] = {}

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The selection of the inner scheduler, with proposals; nothing while their tokens are awaited."""
        now = self._clock()
        if self.is_on and self._overlaps and any([one.in_flight for one in pool.running.values()]):
            return Selection(())
        self._take_results()
        selection = self.inner.select(pool, kv)
        # on several stages: the next token of some requests is on its way
        if self.is_on or self._sent:
            known = [choice for choice in selection.choices if not self._is_awaited(choice.request)]
            selection = selection._replace(choices=known)
        if not selection.choices:
            return selection
        self._measure(selection.choices, now)
        if len(selection.choices) > self._limits.max_bs or selection.preempted:
            self._last, self.is_on = None, False
            return selection
        self._decide(selection.choices)
        if not self.is_on:
            self._begin(selection.choices, (), now, 0.0)
            return selection
        begun = self._clock()
        choices, drafts = self._with_drafts(selection.choices, kv)
        self._begin(choices, drafts, now, self._clock() - begun)
        return selection._replace(choices=choices)

    def may_return(self, request: Request) -> bool:
        """True if the inner scheduler delivers its tokens now."""
        return self.inner.may_return(request)

    def _is_awaited(self, request: Request) -> bool:
        """True if a result in flight decides about the next token of a request, or about its proposals."""
        return request.request_id in self._sent or (
            self.is_on and request.num_pending > 0 and _may_propose(request)
        )

    def _take_results(self) -> None:
        """Pass the results of proposals on."""
        for request_id, (request, num_tokens, num_drafts) in list(self._sent.items()):
            if not request.in_flight:
                del self._sent[request_id]
                num_accepted = request.num_tokens - num_tokens - 1
                if num_accepted >= 0 and request.finish_reason is None:
                    self._proposer.verified(request, num_drafts, num_accepted)

    def _decide(self, choices: Sequence[Choice]) -> None:
        """Turn speculation on or off, by the chances of some of the generating requests."""
        self._until_check -= 1
        if self._until_check > 0:
            return
        generating = [choice.request for choice in choices if _may_propose(choice.request)]
        if not generating:
            return
        self._until_check = CHECK_EVERY
        stride = ceil_div(len(generating), SAMPLED)
        sampled = [
            (self._proposer.chance(request), self._most(request))
            for request in generating[::stride]
        ]
        share = self._share(choices, (sampled * stride)[: len(generating)])
        was_on = self.is_on
        self._num_on = self._num_on + CHECK_EVERY if self.is_on else 0
        self.is_on = share.gain > (TURN_OFF if was_on else TURN_ON) and self._num_on < MEASURE_EVERY
        num_tokens = sum([choice.num_tokens for choice in choices]) + share.number
        if self.is_on and not self.times.is_measured(num_tokens, waits=True):
            self._until_check = TRY_FOR
        self._since_try += CHECK_EVERY
        self._is_trying = not (self.is_on or was_on) and self._may_try(share)
        if self._is_trying:
            self.is_on = True
            self._until_check = TRY_FOR
            self._since_try = 0
            self._pause = max(TRY_AFTER, 2 * self._pause)

    def _may_try(self, share: Share) -> bool:
        """Return True if a try might show a gain, and costs little if it shows none."""
        cost = TRY_FOR * (share.most_seconds - 1)
        allowed = TRY_COST + TRY_SHARE * self._since_try
        is_due = self._since_try >= self._pause
        return is_due and share.most_tokens > WORTH_A_TRY and cost <= allowed

    def _with_drafts(
        self, choices: Sequence[Choice], kv: KVManager
    ) -> tuple[list[Choice], Sequence[Sequence[int]]]:
        """The choices with proposals, as many as pay off and as blocks are free."""
        able = [
            choice.request
            for choice in choices
            if _is_known(choice) and _may_propose(choice.request)
        ]
        chances = []
        for request in able:
            count = min(self._proposer.ready(request), self._most(request))
            chances.append((Chance(1.0, self._proposer.chance(request).each), count))
        share = self._share(choices, chances)
        wishes = _split(able, chances, share.most if self._is_trying else share.number)
        wishes = _with_blocks(wishes, choices, kv)
        proposals = dict(
            zip(
                [wish.request.request_id for wish in wishes],
                self._proposer.propose(wishes),
                strict=True,
            )
        )
        extended = []
        for choice in choices:
            drafts = proposals.get(choice.request.request_id)
            if drafts:
                self._sent[choice.request.request_id] = (
                    choice.request,
                    choice.request.num_tokens,
                    len(drafts),
                )
                choice = choice._replace(drafts=drafts)
                if self._charge is not None:
                    self._charge(choice.request, len(drafts))
            extended.append(choice)
        return extended, list(proposals.values())

    def _most(self, request: Request) -> int:
        """The most proposals of use for a request: one token more is drawn."""
        left = request.params.max_tokens - len(request.generated_ids) - request.num_pending - 1
        return min(self._limits.per_request, left)

    def _share(self, choices: Sequence[Choice], chances: Sequence[tuple[Chance, int]]) -> Share:
        """The best number of proposals in an iteration, from the chances and the most ids of each request."""
        num_tokens = sum([choice.num_tokens for choice in choices])
        limits = self._limits
        most = min(limits.per_iteration, limits.max_tokens - num_tokens)
        if any([_needs_full_sampler(choice.request) for choice in choices]):
            most = min(most, limits.with_extras - len(choices))
        ordered = _ordered(chances)[: max(0, most)]
        if not ordered:
            return NO_GAIN
        return best_share(
            self.times,
            num_tokens,
            len(choices),
            [chance for chance, _, _ in ordered],
            per_round=self._proposer.seconds,
            rounds=[place for _, place, _ in ordered],
        )

    def _measure(self, choices: Sequence[Choice], now: float) -> None:
        """Take the time of the last iteration, if its requests still generate."""
        last = self._last
        self._last = None
        if (
            last is not None
            and last.waits == self.is_on
            and choices[0].request.request_id in last.members
        ):
            self.times.add_time(last.num_tokens, now - last.at - last.proposing, waits=last.waits)

    def _begin(
        self,
        choices: Sequence[Choice],
        drafts: Sequence[Sequence[int]],
        now: float,
        proposing: float,
    ) -> None:
        """Remember an iteration to be measured, if all its requests generate.

        The one before, which may still run, must be of the same kind: its time counts, too.
        """
        generates = all([choice.num_tokens == 1 for choice in choices])
        kind = (self.is_on, generates)
        is_steady = kind == self._kind
        self._kind = kind
        if generates and is_steady:
            members = frozenset([choice.request.request_id for choice in choices])
            self._last = _OpenMeasurement(
                now, len(choices) + sum(map(len, drafts)), self.is_on, members, proposing
            )


def _may_propose(request: Request) -> bool:
    """True if ids may be proposed for a request: its draws depend on logits, seed and position alone."""
    return (
        request.row is not None
        and request.num_computed >= len(request.prompt_ids)
        and request.constraint is None
        and request.finish_reason is None
        and not request.aborted
        and not request.params.has_extras
    )


def _is_known(choice: Choice) -> bool:
    """True if the choice is the newest token of its request, and the host knows it."""
    return choice.num_tokens == 1 == choice.request.num_left and not choice.request.num_pending


def _needs_full_sampler(request: Request) -> bool:
    return (
        request.constraint is not None
        or request.params.has_extras
        or request.params.prompt_logprobs is not None
    )


def _ordered(chances: Sequence[tuple[Chance, int]]) -> list[tuple[float, int, int]]:
    """The chance of each proposed id, its place in its proposal, and its request; in descending order."""
    found = []
    for index, (chance, most) in enumerate(chances):
        value = chance.any
        for place in range(1, most + 1):
            value *= chance.each
            found.append((value, place, index))
    return sorted(found, key=lambda each: -each[0])


def _split(
    requests: Sequence[Request], chances: Sequence[tuple[Chance, int]], count: int
) -> list[Wish]:
    """Distribute `count` proposals over requests, the most probable ones first."""
    counts = [0] * len(requests)
    for _, _, index in _ordered(chances)[:count]:
        counts[index] += 1
    return [
        Wish(request, number) for request, number in zip(requests, counts, strict=True) if number
    ]


def _with_blocks(wishes: Sequence[Wish], choices: Sequence[Choice], kv: KVManager) -> list[Wish]:
    """The wishes as far as blocks are free beside those for the choices."""
    if kv.has_reservations:  # a request reserves slots for all its tokens
        return list(wishes)
    free = kv.num_free_blocks
    for choice in choices:
        request = choice.request
        end = choice.request.num_computed + choice.num_tokens
        free -= (
            kv.needed(choice.hit, choice.hit.num_tokens + end)
            if request.row is None
            else kv.lacking(request.row, end)
        )
    free = not_below_zero(free)
    kept = []
    for request, count in wishes:
        assert request.row is not None, f"{request.request_id} has no row"
        end = request.num_computed + 1
        base = kv.lacking(request.row, end)
        blocks = kv.lacking(request.row, end + count) - base
        if blocks > free:
            blocks = kv.no_blocks
            count = kv.room(request.row, base) - end
        free -= blocks
        if count:
            kept.append(Wish(request, count))
    return kept
