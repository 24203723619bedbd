"""The pipelines of the paper's Figure 8: batches on stages under ORCA, and microbatches under FasterTransformer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lab.paper.effort import Effort
from lab.paper.places import Place, build, serve_system
from lab.paper.runs import Lengths, homogeneous, paper_lengths
from lab.paper.systems import System
from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import ExecutorStats, StepPlan

MODEL = "341B"  # the paper's model of four stages
BATCH = 8
# tokens of an iteration of `chunked`: with 512, prompts delay the batches behind them as under ORCA
BUDGET = 128
PIPELINES: Mapping[str, Mapping[int, System]] = {
    "orca": dict.fromkeys((1, 4, 5), System("orca", BATCH)),
    "chunked": dict.fromkeys((1, 4, 5), System("chunked", BATCH)),
    "ft": {1: System("ft", BATCH, BATCH), 4: System("ft", BATCH, BATCH // 4)},
}
"""Systems by name and iterations in flight. FasterTransformer cuts its batch into as many microbatches."""
EQUAL = 32, 32  # prompt and generated tokens of equal requests (Figure 11)
DRAWN = {
    "ORCA, max_bs 2": System("orca", 2),
    "FasterTransformer, 8 requests in 4 microbatches": System("ft", 8, 2),
}
SHORT = [Lengths(32, generated, generated) for generated in (2, 6, 3, 5, 4, 2, 6, 3) * 2]
"""The requests of the drawing."""


class Busy(NamedTuple):
    """The work of one stage on one iteration, in seconds."""

    stage: int
    start: float
    end: float
    requests: tuple[int, ...]  # numbers of the members
    is_initiation: bool  # True if a member processes a part of its prompt


class StageObserver(Observer):
    """Notes the times of all stages, in `busy`."""

    def __init__(self, executor: SimExecutor, clock: VirtualClock) -> None:
        self.busy: list[Busy] = []
        self._executor = executor
        self._clock = clock
        self._before = executor.free_at

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """Note an iteration: a stage begins when it is free, and when the stage before has ended."""
        requests = tuple(int(member.request_id) for member in plan.members)
        is_initiation = any(
            member.start < SHORT[int(member.request_id)].num_prompt for member in plan.members
        )
        after = self._executor.free_at
        ready = self._clock.now
        for stage, (free, end) in enumerate(zip(self._before, after, strict=True)):
            self.busy.append(Busy(stage, max(free, ready), end, requests, is_initiation))
            ready = end
        self._before = after


def figure_8(effort: Effort) -> dict[str, Any]:
    """Requests per second of batches in flight on four stages, with all requests at once, relative to one in flight.

    Returns:
        `gain` by workload, system and iterations in flight, and `drawn_seconds`, the end of each drawing.
    """
    number = max(200, effort.requests // 4)
    workloads = {"paper": paper_lengths(number, effort.seed), "equal": homogeneous(*EQUAL, number)}
    gain: dict[str, dict[str, dict[str, float]]] = {}
    for workload, requests in workloads.items():
        for name, in_flight in PIPELINES.items():
            rates = [
                _saturated(system, n_workers, requests) for n_workers, system in in_flight.items()
            ]
            numbers = [str(n_workers) for n_workers in in_flight]
            gains = [rate / rates[0] for rate in rates]
            gain.setdefault(workload, {})[name] = dict(zip(numbers, gains, strict=True))
    return {
        "gain": gain,
        "drawn_seconds": [max(box.end for box in busy) for busy in stage_times().values()],
    }


def _saturated(system: System, n_workers: int, requests: Sequence[Lengths]) -> float:
    """Requests per second if all arrive at once."""
    place = Place(MODEL, n_workers=n_workers, token_budget=BUDGET)
    return len(requests) / max(serve_system(system, place, requests, [0.0] * len(requests)).ends)


def stage_times() -> dict[str, list[Busy]]:
    """The stages' work on the first requests, by system: all of them arrive at once."""
    found = {}
    for name, system in DRAWN.items():
        place = Place(MODEL)
        lengths = {str(index): each.num_generated for index, each in enumerate(SHORT)}
        simulation = build(system, place, lengths)
        engine = simulation.engine
        observer = StageObserver(simulation.executor, simulation.clock)
        with engine.observed_by(observer):
            for index, each in enumerate(SHORT):
                engine.add_request(
                    str(index),
                    [1] * each.num_prompt,
                    SamplingParams(each.max_tokens, ignore_eos=True),
                )
            while engine.has_work:
                engine.step()
        found[name] = observer.busy
    return found
