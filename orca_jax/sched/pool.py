"""The request pool: every live request, from its arrival until the delivery of its last token."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import ClassVar

from orca_jax.sched.adapters import AdapterRoom, AdapterSlots
from orca_jax.sched.admission import (
    all_tokens,
    build_constraint,
    check_length,
    check_params,
    check_prompt,
)
from orca_jax.sched.drafts.counts import DraftCounts
from orca_jax.sched.kv import KVManager
from orca_jax.sched.predict import EnginePredictor
from orca_jax.sched.prefixes.cache import NO_HIT, Hit
from orca_jax.sched.prefixes.reuse import PrefixReuse
from orca_jax.sched.prefixes.spans import NOBODY
from orca_jax.sched.request import Request, State, advance, append, resume, update_of
from orca_jax.values.errors import RequestError
from orca_jax.values.request import (
    DEFAULT_URGENCY,
    Constraint,
    RequestUpdate,
    SamplingParams,
    TokenSet,
    Urgency,
)
from orca_jax.values.resumed import Resumed
from orca_jax.values.step import MemberResult, SpannedPrompt, StepPlan, StepResult

NOTHING_ALLOWED = (
    "no token could follow: no id is allowed by min_tokens, allowed_token_ids, bad_token_ids and the structure of the "
    "output together; relax one of them"
)


class ClientBound:
    """Predicts `max_tokens`, the client's bound. Only this prediction is never too low."""

    refresh: ClassVar[int | None] = None

    def predict(self, request: Request, ids: Sequence[int]) -> float:
        """The client's bound."""
        return float(request.params.max_tokens)

    def observe(self, request: Request, length: int) -> None:
        """Does nothing: the bound does not depend on other requests."""


class RequestPool:
    """Owns requests in order of arrival. Only the pool changes them, in part by functions of `request`.

    A request's life: `add_request`, `admit` (a row and a reservation), then for each iteration `start`, `allowed` if
    it is constrained, `record` and `deliver`. `deliver` returns its new tokens, and at its end releases its row, slots
    and blocks. `abort` is possible at any time.

    Iterating yields live requests in order of arrival, lazily: a scheduler may stop early, without reading thousands
    of waiting requests.

    Args:
        kv: rows, slots and blocks; the pool releases them when a request leaves.
        vocab_size: prompt ids are below it.
        max_model_len: the largest number of prompt and generated tokens of one request.
        eos_token_ids: the model's end tokens.
        reuses_prefixes: True if requests begin with cached blocks of equal prefixes.
        reuses_in_calls: True if requests of one call do so (`SamplingParams.shared_tokens`), also if others do not.
        predictor: predicts the output length of each request; None for the client's bound.
        adapters: the slots of adapters; None for no adapters.
        spanless_family: the model's family, if it has no place for vector spans; they are then refused by its name.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        reuses_prefixes: bool = False,
        reuses_in_calls: bool = False,
        predictor: EnginePredictor | None = None,
        adapters: AdapterSlots | None = None,
        spanless_family: str | None = None,
    ) -> None:
        self.kv = kv
        self.adapters = adapters or AdapterSlots()
        self.predictor: EnginePredictor = predictor or ClientBound()
        self.reuses_prefixes = reuses_prefixes
        self.reuse: PrefixReuse | None = None
        if reuses_prefixes or (reuses_in_calls and kv.states is None):
            self.reuse = PrefixReuse(kv, of_calls=not reuses_prefixes)
        self.running: dict[str, Request] = {}  # requests with a row, in order of admission
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._spanless_family = spanless_family
        self._eos_ids = frozenset(eos_token_ids)
        self._all_tokens = all_tokens(vocab_size)
        self._live: OrderedDict[str, Request] = OrderedDict()
        self._undelivered: dict[str, Request] = {}  # requests with new ids or an end
        self.num_arrived = 0  # requests ever added
        self.num_plans = 0  # plans ever made: the number of the next one
        self.now = 0.0  # seconds on the engine's clock, of the selection that is made
        self.num_sets = 0  # of allowed ids ever computed
        self.num_preemptions = 0  # in all; the schedulers of the paper never preempt
        self.num_cache_queries = 0  # prompt tokens of all requests ever admitted
        self.num_cache_hits = 0  # of these, tokens in blocks of the prefix cache
        self.drafts = DraftCounts()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_work(self) -> bool:
        """True if a request waits, runs, or has an undelivered update."""
        return bool(self._live or self._undelivered)

    def arrived_since(self, count: int) -> Iterator[Request]:
        """The live requests after the first `count` arrivals, latest first; earlier requests are not read."""
        return takewhile(
            lambda request: request.arrival_index >= count, reversed(self._live.values())
        )

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        arrival: float,
        constraint: Constraint | None = None,
        urgency: Urgency = DEFAULT_URGENCY,
        adapter: str | None = None,
        resumed: Resumed | None = None,
    ) -> Request:
        """Enqueue a request.

        `prompt_ids` may be a `SpannedPrompt`. `seed` is used if `params.seed` is None; `arrival` is in seconds on the
        engine's clock. `constraint` acts together with the parameters and belongs to this request from now on;
        `params.structured` requires one. The scheduler's ordering reads `urgency`. `adapter` is the name of a loaded
        adapter. The request goes on after the ids of `resumed`.

        Raises:
            RequestError: the request could never run; `param` names the field, and the pool is unchanged.
        """
        if request_id in self._live or request_id in self._undelivered:
            raise RequestError(
                f"a request with id {request_id!r} is already in the pool", param="request_id"
            )
        prompt_ids = self._own(prompt_ids, params)
        check_prompt(prompt_ids, self.vocab_size)
        if resumed is not None:
            check_prompt(resumed.ids, self.vocab_size)
        num_new = params.max_tokens if params.pooling is None else 0
        check_length(len(prompt_ids), num_new, max_model_len=self.max_model_len, kv=self.kv)
        check_params(params, constraint, self.vocab_size)
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._eos_ids
        )
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            arrival=arrival,
            arrival_index=self.num_arrived,
            seed=seed if params.seed is None else params.seed,
            stop_ids=stop_ids,
            constraint=build_constraint(params, stop_ids, self.vocab_size, constraint),
            urgency=urgency,
            adapter=None if adapter is None else self.adapters.get(adapter),
        )
        if resumed is not None:
            resume(request, resumed)
        request.predicted_output = self.predictor.predict(request, prompt_ids)
        self.num_arrived += 1
        self._live[request_id] = request
        if request.adapter is not None:
            self.adapters.enter(request.adapter)
        return request

    def abort(self, request_id: str) -> bool:
        """End a request now, or, if it is in flight, when its iterations are recorded.

        Its last update has the reason "abort" and no ids. Returns False if the request is not live, or is aborted
        already. This is not an error: it may have ended a moment ago.
        """
        request = self._live.get(request_id)
        if request is None or request.aborted:
            return False
        request.aborted = True
        if not request.in_flight:  # an iteration in flight still writes into the request's blocks
            self._end_aborted(request)
        return True

    def newcomers(self) -> Callable[[Request], bool]:
        """A test for the selection of one iteration: true if a newcomer needs no slot, or can have one."""
        room: AdapterRoom | None = None

        def takes(request: Request) -> bool:
            nonlocal room
            if request.adapter is None:
                return True
            room = room or self.adapters.room()
            return room.takes(request.adapter)

        return takes

    def admit(self, request: Request, now: float, hit: Hit = NO_HIT) -> None:
        """Give a waiting request a row, a reservation (with `n_slots`), and its blocks in the prefix cache."""
        request.row = row = self.kv.acquire_row()
        request.is_suspect = False  # it gets other blocks than before a preemption
        self.running[request.request_id] = request
        request.slot = 0 if request.adapter is None else self.adapters.pin(request.adapter)
        if self.kv.has_reservations:
            self.kv.reserve(row, len(request.prompt_ids), request.max_total)
        if self.reuse is not None:
            self.reuse.begin(request, row, hit)
        lost = self.kv.prefixes.lost
        if lost is not None:
            lost.cause = request.request_id
            if self.reuse is not None and request.first_scheduled is None:
                request.lost = lost.first(self.reuse.missed(request))
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached = request.num_computed
            self.num_cache_queries += len(request.prompt_ids)
            self.num_cache_hits += request.num_computed

    def preempt(self, request: Request) -> None:
        """Take row and pages from a running request. It waits again, and later computes its tokens again.

        It may be in flight: the device runs plans in the order of submission, so a new holder writes into the blocks
        later. Tokens kept on the device are lost, and are drawn again from the same seed.
        """
        row = request.row
        assert row is not None, f"{request.request_id} does not run"
        self._vacate(request, row)
        request.num_computed = request.num_remembered = 0
        request.was_sought = False
        self.num_preemptions += 1
        if not request.in_flight:
            request.state = State.INITIATION
            request.num_pending = 0

    def start(self, request: Request, iteration: int, num_computed: int, is_sampling: bool) -> None:
        """Mark a request as running; plan `iteration` computes its tokens up to `num_computed` (lines 6-7)."""
        request.state = State.RUNNING
        request.in_flight += 1
        request.num_computed = num_computed
        if is_sampling:
            request.num_pending += 1
            request.drawn_in = iteration

    def allowed(self, plan: StepPlan) -> list[TokenSet]:
        """The allowed ids of the constrained members of a plan, no set empty; for `Executor.constrain`.

        If a request's set is empty or cannot be computed, it may draw any id. It then ends with reason "error", when
        the iteration is recorded.
        """
        return [
            self._allowed(self._live[member.request_id])
            for member in plan.members
            if member.is_constrained
        ]

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Record the results of an iteration (lines 11-13 of Algorithm 1)."""
        number = len(plan.members)
        others = len(result.members)
        assert others == number, (
            f"iteration {plan.iteration} has {number} members, the result has {others}"
        )
        for member, each in zip(plan.members, result.members, strict=True):
            request = self._live[member.request_id]
            advance(request, member, each)
            if member.num_drafts:
                self.drafts.add_proposal(member.num_drafts, len(each.run) - 1)
            if not each.is_finite and not request.is_suspect:
                request.is_suspect = True
                if self.reuse is not None:
                    self.reuse.distrust(request, self.running.values())
            if not request.in_flight:
                has_prompt = request.num_computed >= len(request.prompt_ids)
                request.state = State.INCREMENT if has_prompt else State.INITIATION
            self._settle(request, each)
            if self.reuse is not None and request.row is not None and not request.is_suspect:
                self.reuse.remember(request, request.row)

    def _settle(self, request: Request, result: MemberResult) -> None:
        """Append the results of a request, or let it leave with its last one."""
        if request.has_ended or request.aborted:
            if request.in_flight:
                return
            if request.has_ended:
                self._leave(request)
            else:
                self._end_aborted(request)
            return
        has_result = bool(result.run) or result.pooled is not None
        if has_result and request.finish_reason is None:  # else: computed past the end, dropped
            append(request, result)
            self._undelivered[request.request_id] = request

    def deliver(self, may_return: Callable[[Request], bool], now: float) -> list[RequestUpdate]:
        """Return the updates allowed by `may_return`; ended requests release their memory (lines 13-14) and leave."""
        due = [request for request in self._undelivered.values() if may_return(request)]
        for request in due:
            del self._undelivered[request.request_id]
        return [self._update(request, now) for request in due]

    def check_integrity(self) -> None:
        """Assert that requests, rows, slots and blocks agree. For tests; O(live requests + blocks).

        Raises:
            AssertionError: the message names the inconsistency.
        """
        self.kv.check_integrity()
        self.adapters.check_integrity()
        previous = -1
        holders: dict[int, str] = {}
        for request_id, request in self._live.items():
            assert request.arrival_index > previous, f"{request_id} is out of order"
            previous = request.arrival_index
            assert request.state is not State.FINISHED, (
                f"{request_id} has finished and is still live"
            )
            assert (request.state is State.RUNNING) == (request.in_flight > 0), (
                f"{request_id}: {request.state}"
            )
            if request.row is None:
                assert not request.num_computed, (
                    f"{request_id} has computed {request.num_computed} tokens without a row"
                )
                assert request_id not in self.running, f"{request_id} runs without a row"
                continue
            assert request_id in self.running, (
                f"{request_id} holds row {request.row} and does not run"
            )
            assert request.row not in holders, (
                f"{request_id} and {holders[request.row]} hold row {request.row}"
            )
            holders[request.row] = request_id
            size = len(request.prompt_ids), request.max_total
            reserved = self.kv.demand(*size) if self.kv.has_reservations else self.kv.no_blocks
            assert self.kv.slots_of(request.row) == reserved, (
                f"{request_id} reserved something else"
            )
            room = self.kv.num_pages_of(request.row) * self.kv.page_size
            assert request.num_computed <= room, (
                f"{request_id} wrote {request.num_computed} tokens into {room} slots"
            )
        assert len(holders) == len(self.running) == self.kv.num_held_rows, (
            "a row is held by no live request"
        )

    def _own(self, prompt: Sequence[int], params: SamplingParams) -> list[int] | SpannedPrompt:
        """A prompt that no caller changes. Raises RequestError for vector spans that are wrong, or have no place."""
        if type(prompt) is not SpannedPrompt or not prompt.spans:
            return list(prompt)
        if self._spanless_family is not None:
            message = (
                f"the prompt has vector spans, and models of the family {self._spanless_family} read ids alone; leave "
                "the spans out"
            )
            raise RequestError(message, param="prompt")
        if prompt.fault:
            raise RequestError(prompt.fault, param="prompt")
        if params.prompt_logprobs is not None:
            message = (
                "prompt_logprobs must be None beside vector spans: a vector has no probability"
            )
            raise RequestError(message, param="prompt_logprobs")
        return SpannedPrompt(tuple(prompt.ids), tuple(prompt.spans))

    def _allowed(self, request: Request) -> TokenSet:
        if request.finish_reason is not None or request.constraint is None:
            return self._all_tokens  # since the submission it has ended, or its constraint is over
        self.num_sets += 1
        try:
            tokens = request.constraint.allowed() & self._all_tokens
        except RequestError as error:
            request.error = error.message
            return self._all_tokens
        if not tokens:
            request.error = NOTHING_ALLOWED
        return tokens or self._all_tokens

    def _end_aborted(self, request: Request) -> None:
        request.finish_reason = "abort"
        self._undelivered[request.request_id] = request
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Remove a request, and release its row, slots and blocks. No request leaves in another way."""
        assert request.state is not State.FINISHED and not request.in_flight, (
            f"{request.request_id} cannot leave now"
        )
        if request.row is not None:
            self._vacate(request, request.row)
        request.state = State.FINISHED
        del self._live[request.request_id]
        if request.adapter is not None:
            self.adapters.leave(request.adapter)

    def _vacate(self, request: Request, row: int) -> None:
        """Release the row, slots and blocks of a request; its pages enter the prefix cache, also the last one."""
        if self.reuse is not None:
            self.reuse.end(request, row)
        self.kv.free(row, NOBODY if self.kv.retainer is None else request.owner)
        if self.kv.has_reservations:
            self.kv.release(row)
        self.kv.release_row(row)
        request.row = None
        if request.adapter is not None:
            self.adapters.unpin(request.adapter)
        del self.running[request.request_id]

    def _update(self, request: Request, now: float) -> RequestUpdate:
        update = update_of(request, now)
        reason = request.finish_reason
        if reason is None or reason == "abort":  # an aborted request has left already
            return update
        if reason != "error" and request.pooled is None:
            self.predictor.observe(request, len(request.generated_ids))
        request.has_ended = True
        if not request.in_flight:  # else it leaves when that iteration is recorded
            self._leave(request)
        return update
