"""A run of four requests on the toy model, with the decisions of every iteration."""

from dataclasses import dataclass, field
from typing import NamedTuple

from orca_jax.assembly.engine import build_engine
from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Held
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import ExecutorStats, StepPlan

PAGE_SIZE = 4
NUM_PAGES = 10
BUDGET = 8
FOLLOWED = "C"
SHARED = 5  # tokens at the begin of the prompts of B and C


class Asked(NamedTuple):
    """A request of the tour; it arrives before an iteration."""

    name: str
    iteration: int
    prompt: int  # tokens
    output: int


REQUESTS = (Asked("A", 0, 6, 12), Asked("B", 0, 9, 10), Asked("C", 1, 15, 7), Asked("D", 4, 5, 5))
CONFIG = EngineConfig(
    model="preset:toy",
    scheduler="chunked",
    page_size=PAGE_SIZE,
    num_pages=NUM_PAGES,
    max_num_seqs=3,
    max_num_batched_tokens=BUDGET,
    max_model_len=40,
    overlap=False,
)


class Part(NamedTuple):
    """The tokens of one request in an iteration."""

    name: str
    start: int  # position of the first token
    tokens: int
    is_sampling: bool
    is_increment: bool


@dataclass
class Turn:
    """One iteration, after its submission."""

    parts: list[Part]
    pages: dict[str, list[int]]  # of each request with a row
    waiting: list[str]
    preempted: list[str]
    held: Held | None


@dataclass
class Tour:
    """The iterations of the run, the last iteration of each request, and its cached tokens at each admission."""

    turns: list[Turn] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the requests, in the order of arrival."""
        return [asked.name for asked in REQUESTS]


class _Recorder(Observer):
    def __init__(self, tour: Tour) -> None:
        self._tour = tour
        self._preempted: list[str] = []
        self._held: Held | None = None

    def preempted(self, request: Request) -> None:
        self._preempted.append(request.request_id)

    def planned(self, held: Held | None) -> None:
        self._held = held

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        prompts = {asked.name: asked.prompt for asked in REQUESTS}
        parts = []
        for member in plan.members:
            tokens = len(member.ids) + member.last_on_device
            is_increment = tokens == 1 and member.start >= prompts[member.request_id]
            parts.append(
                Part(member.request_id, member.start, tokens, member.is_sampling, is_increment)
            )
        pages = {
            request.request_id: list(pool.kv.blocks_of(request.row)[0])
            for request in pool
            if request.row is not None
        }
        waiting = [request.request_id for request in pool if request.row is None]
        self._tour.turns.append(Turn(parts, pages, waiting, self._preempted, self._held))
        self._preempted = []


def take_tour() -> Tour:
    """Run the requests to their ends."""
    tour = Tour()
    with build_engine(CONFIG) as built, built.engine.observed_by(_Recorder(tour)):
        while len(tour.ends) < len(REQUESTS):
            now = len(tour.turns)
            for asked in REQUESTS:
                if asked.iteration == now:
                    params = SamplingParams(max_tokens=asked.output, temperature=0, ignore_eos=True)
                    built.engine.add_request(asked.name, _prompt(asked), params)
            for update in built.engine.step():
                if update.finish_reason is not None:
                    tour.ends[update.request_id] = now
    return tour


def _prompt(asked: Asked) -> list[int]:
    """Make ids that differ between requests; B and C begin alike, as two questions to one system message."""
    shared = list(range(SHARED)) if asked.name in "BC" else []
    return shared + [
        (ord(asked.name) * 7 + index) % 250 for index in range(asked.prompt - len(shared))
    ]
