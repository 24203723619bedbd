"""`RequestView` over the engine's own requests."""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.predict import EnginePredictor
from orca_jax.sched.prefixes.cache import NO_HIT, Hit
from orca_jax.sched.request import Request, State

_SPARE = 64  # jobs that ended while they waited, before they are removed


class PolicyRequest:
    """A `policy.RequestView` over a request."""

    __slots__ = (
        "_table",
        "admitted_with",
        "hit",
        "left",
        "num_evictions",
        "predicted_at",
        "request",
    )

    index = property(attrgetter("request.arrival_index"))
    arrival = property(attrgetter("request.arrival"))
    max_tokens = property(attrgetter("request.params.max_tokens"))
    num_pending = property(attrgetter("request.num_pending"))
    num_computed = property(attrgetter("request.num_computed"))
    predicted = property(attrgetter("request.predicted_output"))
    priority = property(attrgetter("request.urgency.priority"))
    tenant = property(attrgetter("request.urgency.tenant"))
    deadline = property(attrgetter("request.urgency.deadline"))
    program = property(attrgetter("request.urgency.program"))
    weight = property(attrgetter("request.urgency.weight"))
    ttft = property(attrgetter("request.urgency.ttft"))
    tpot = property(attrgetter("request.urgency.tpot"))
    first_token = property(attrgetter("request.first_token"))
    last_token = property(attrgetter("request.last_token"))

    def __init__(self, request: Request, table: "JobTable | None" = None) -> None:
        self.request = request
        self._table = table
        self.num_evictions = 0
        self.admitted_with = 0  # generated tokens at the last admission
        self.predicted_at = 0  # generated tokens at the last prediction
        self.hit: tuple[int, Hit] = (-1, NO_HIT)  # the number of the selection that it was found in
        # of a resident: tokens that may be processed in this selection
        self.left: int | None = None

    def __repr__(self) -> str:
        return f"job {self.index}"

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.request.generated_ids)

    @property
    def num_left(self) -> int:
        if self.left is not None:
            return self.left
        if self._table is None:
            return self.request.num_left
        return self._table.num_left(self)

    @property
    def num_cached(self) -> int:
        if self.is_resident or self._table is None:
            return 0
        return self._table.hit_of(self).num_tokens

    @property
    def is_resident(self) -> bool:
        return self.request.row is not None


def _stays(job: PolicyRequest) -> bool:
    return not (job.request.finish_reason or job.request.aborted)


class _Jobs(dict[Request, PolicyRequest]):
    """The job of each request, made when it is looked at."""

    def __init__(self, table: "JobTable") -> None:
        self._table = table

    def __missing__(self, request: Request) -> PolicyRequest:
        self[request] = job = PolicyRequest(request, self._table)
        return job


class JobTable:
    """The jobs of all live requests that were looked at, and the facts of the current selection.

    Attributes:
        jobs: by request; a job is made when it is looked at.
        with_rows: the jobs with rows.
        residents: of these, the ones that have not ended.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.jobs = _Jobs(self)
        self._pool: RequestPool | None = None
        self._number = 0  # of the current selection
        self.with_rows: Sequence[PolicyRequest] = ()
        self.residents: Sequence[PolicyRequest] = ()

    def begin(self, pool: RequestPool) -> list[PolicyRequest]:
        """Begin a selection; returns the jobs that ended since the last one."""
        self._pool = pool
        self._number = self._number + 1
        before = self.with_rows
        self.with_rows = self.residents = tuple(map(self.jobs.__getitem__, pool.running.values()))
        ended = []
        if before != self.with_rows:
            gone = [job for job in before if job.request.row is None]
            for job in gone:
                job.left = None
            ended = [job for job in gone if job.request.state is State.FINISHED]
        if len(self.jobs) > 2 * len(pool) + _SPARE:
            ended = [job for job in self.jobs.values() if job.request.state is State.FINISHED]
        for job in ended:
            del self.jobs[job.request]
        self._read(pool)
        return ended

    def _read(self, pool: RequestPool) -> None:
        """Read the number of tokens that each resident has left, and predict lengths again."""
        # tokens drawn in later plans are on their way through the stages
        last = pool.num_plans - self._num_stages
        is_leaving = False
        for job in self.with_rows:
            request = job.request
            if request.finish_reason or request.aborted:
                job.left = 0
                is_leaving = True
            elif request.drawn_in > last and request.num_pending:
                job.left = 0
            else:
                job.left = request.num_left
        if is_leaving:
            self.residents = tuple(filter(_stays, self.with_rows))
        refresh = pool.predictor.refresh
        if refresh is not None:
            self._predict(pool.predictor, refresh)

    def _predict(self, predictor: EnginePredictor, refresh: int) -> None:
        """Predict the lengths of residents again, after each `refresh` generated tokens."""
        for job in self.residents:
            seen = job.num_generated
            if seen >= job.predicted_at + refresh:
                request = job.request
                ids = [*request.prompt_ids, *request.generated_ids]
                request.predicted_output = predictor.predict(request, ids)
                job.predicted_at = seen

    def waiting(self) -> Iterator[PolicyRequest]:
        """The jobs without a row that could get one."""
        pool = self._pool
        assert pool is not None, "no selection has begun"
        if len(pool) > len(pool.running):
            for request in pool:
                if request.row is None and not request.in_flight:
                    yield self.jobs[request]

    def is_live(self, job: object) -> bool:
        """True if a job is one of this table, and its request has not left."""
        if not isinstance(job, PolicyRequest) or self.jobs.get(job.request) is not job:
            return False
        return job.request.state is not State.FINISHED

    def hit_of(self, job: PolicyRequest) -> Hit:
        """The beginning of a waiting job in the prefix cache; looked up once for each selection."""
        assert self._pool is not None, "no selection has begun"
        number, hit = job.hit
        if number != self._number:
            hit = NO_HIT if self._pool.reuse is None else self._pool.reuse.find(job.request)
            job.hit = self._number, hit
        return hit

    def take_newcomer(self, job: PolicyRequest, hit: Hit) -> None:
        """Let a waiting job begin with a hit that was found in this selection."""
        job.hit = self._number, hit
        job.admitted_with = len(job.request.generated_ids)

    def drop_copy(self, job: PolicyRequest, page_size: int) -> None:
        """Let a waiting job begin with whole pages alone, in this selection."""
        hit = self.hit_of(job)
        if hit.sources:
            job.hit = self._number, hit.without_copy(page_size)

    def num_left(self, job: PolicyRequest) -> int:
        """Tokens of a waiting job that may be processed in this selection."""
        request = job.request
        pool = self._pool
        assert pool is not None, "no selection has begun"
        if request.finish_reason is not None or request.aborted or not request.is_idle:
            return 0
        if pool.reuse is not None and pool.reuse.awaits_prompt(request, ()):
            return 0
        return request.num_tokens - self.hit_of(job).num_tokens
