"""The systems of the paper's evaluation on simulated devices: engines around the schedulers of the package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lab.policies.cells import CellScheduler
from orca_jax.bench.feed import advance
from orca_jax.bench.paper.runs import Drive, Lengths, RunResult, serve
from orca_jax.bench.paper.systems import System
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.plan.accelerators import ACCELERATORS
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import KnownScheduler
from orca_jax.sim.cost import StageCost
from orca_jax.sim.executor import END_ID, OTHER_ID, SimExecutor, VirtualClock
from orca_jax.sim.gpt import LONGEST, MODELS, Device, Efficiency

EFFICIENCIES: Mapping[str, Efficiency] = {
    "13B": Efficiency(memory=0.49, compute=0.40),  # not in Figure 10; as 101B, which has no pipeline either
    "101B": Efficiency(memory=0.49, compute=0.40),
    "175B": Efficiency(memory=0.53, compute=0.46),
    "341B": Efficiency(memory=0.57, compute=0.52),
}
"""Shares of the peak rates by model, chosen once for the smallest error against Figures 9b and 10."""
FT_FACTOR = 1.25
"""The seconds of FasterTransformer's stages in a pipeline as a multiple of those of ORCA's.

Its workers receive control messages over NCCL and synchronise at each stage; the paper measures up to 1.47 (section
6.1). Without a pipeline both engines are equally fast.
"""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Place:
    """A model on simulated devices, with the settings that a study changes."""

    model: str = "175B"
    device: str = "a100-40"
    efficiency: Efficiency | None = None  # None: that of the model
    slots: float = 1.0  # share of the slots that fit into the memory
    n_workers: int | None = None  # None: one iteration for each stage, and two on a single stage
    control: float = 0.0  # seconds of each stage to pass a plan on
    host: float = 0.0  # seconds of the host before each iteration
    token_budget: int = 512  # of `chunked`
    check_in_interval: int = 1  # of `chunked` on one stage, with one more iteration in flight

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return MODELS[self.model].num_stages

    @property
    def kind(self) -> Device:
        """The rates of the device."""
        return ACCELERATORS[self.device]

    @property
    def cost(self) -> StageCost:
        """The cost of a stage under ORCA."""
        cost = MODELS[self.model].cost(self.kind, self.efficiency or EFFICIENCIES[self.model])
        return replace(cost, control=self.control, host=self.host)

    @property
    def num_slots(self) -> int:
        """The paper's `n_slots`."""
        return int(self.slots * MODELS[self.model].num_slots(self.kind))

    @property
    def in_flight(self) -> int:
        """Iterations in flight."""
        return self.n_workers or max(2, self.num_stages)

    def fits(self, system: System) -> bool:
        """False if the weights, or FasterTransformer's preallocation for `max_bs` requests, exceed the memory."""
        if system.kind == "ft":
            return system.max_bs <= MODELS[self.model].most_preallocated(self.kind)
        return self.num_slots >= LONGEST


@dataclass(frozen=True)
class Simulation:
    """An engine in virtual time."""

    engine: Engine
    executor: SimExecutor
    clock: VirtualClock


def build(system: System, place: Place, lengths: Mapping[str, int]) -> Simulation:
    """An engine that generates `lengths` tokens for the requests of these names.

    Raises:
        ConfigError: the model does not fit, or the system's preallocation does not fit.
    """
    if not place.fits(system):
        raise ConfigError(f"{system.name} is out of memory with {place.model} on {place.device}", param="systems")
    clock = VirtualClock()
    is_slower = system.kind == "ft" and place.num_stages > 1
    cost = place.cost.slower(FT_FACTOR) if is_slower else place.cost
    executor = SimExecutor(cost, clock, lengths, num_stages=place.num_stages)
    scheduler = _MAKERS[system.kind](system, place)
    rows = system.max_bs * scheduler.n_workers
    n_slots = system.max_bs * LONGEST if system.kind == "ft" else place.num_slots
    kv = KVManager(
        -(-(n_slots + rows * (PAGE_SIZE - 1)) // PAGE_SIZE),
        PAGE_SIZE,
        rows,
        n_slots if scheduler.traits.has_reservations else None,
    )
    pool = RequestPool(kv, vocab_size=OTHER_ID + 1, max_model_len=LONGEST, eos_token_ids=(END_ID,))
    engine = Engine(executor, scheduler, pool, clock=clock, check_in_interval=place.check_in_interval)
    return Simulation(engine, executor, clock)


def _chunked(system: System, place: Place) -> KnownScheduler:
    return ChunkedScheduler(
        system.max_bs,
        place.token_budget,
        FirstComeFirstServed(),
        depth=place.in_flight,
        num_stages=min(place.num_stages, place.in_flight),
    )


_MAKERS: Mapping[str, Callable[[System, Place], KnownScheduler]] = {
    "orca": lambda system, place: OrcaScheduler(system.max_bs, place.in_flight),
    "ft": lambda system, place: RequestLevelScheduler(system.max_bs, -(-system.max_bs // system.mbs), system.mbs),
    "chunked": _chunked,
    "cells": lambda system, place: CellScheduler(system.max_bs, place.in_flight),
}


def simulate(
    system: System, place: Place, requests: Sequence[Lengths], arrivals: Sequence[float], *, has_gaps: bool = False
) -> RunResult:
    """Serve all requests, and measure those after the warm-up.

    Raises:
        ConfigError: the model or the system does not fit into the memory.
    """
    lengths = {str(index): request.num_generated for index, request in enumerate(requests)}
    engine, executor, clock = vars(build(system, place, lengths)).values()
    drive = Drive(engine, clock, partial(advance, clock), executor.wait_until)
    prompt = [1] * max([request.num_prompt for request in requests])
    prompts = [prompt[: request.num_prompt] for request in requests]
    return serve(drive, requests, prompts, arrivals, has_gaps=has_gaps)
