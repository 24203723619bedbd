"""The systems of the paper's evaluation on simulated devices: engines around the schedulers of the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.baselines import POLICIES, Policy, Setting
from lab.paper.fits import FITTED, Fit
from lab.paper.gpt import LONGEST, MODELS, Device, EngineCost, StageCost
from lab.paper.kernels import KernelSource, kernel_cost
from lab.paper.runs import Lengths, RunResult, serve
from lab.paper.systems import System
from orca_jax.engine import Engine
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sim.executor import END_ID, OTHER_ID, SimExecutor, VirtualClock
from orca_jax.tools.bench.feed import Drive
from orca_jax.tools.plan.accelerators import ACCELERATORS
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.errors import ConfigError

PAGE_SIZE = 16
FEWEST_SLOTS = 33  # of a request of the paper's workload


@dataclass(frozen=True)
class Place:
    """A model on simulated devices, with the settings that a study changes."""

    model: str = "175B"
    device: str = "a100-40"
    fit: Fit = FITTED
    slots: float = 1.0  # share of the slots that fit into the memory
    # None: one iteration for each stage; on a single stage those of the fit
    n_workers: int | None = None
    control: float = 0.0  # seconds of each stage to pass a plan on
    host: float = 0.0  # seconds of the host before each iteration
    token_budget: int = 512  # of `chunked`
    kernels: KernelSource | None = None  # None: the cost is that of the fit
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
        model = MODELS[self.model]
        cost = model.cost(self.kind, self.fit.efficiencies[self.model])
        request = self.fit.request * model.num_layers / model.num_stages
        return replace(cost, control=self.control, host=self.host, request=request)

    @property
    def num_slots(self) -> int:
        """The paper's `n_slots`."""
        return int(self.slots * MODELS[self.model].num_slots(self.kind))

    @property
    def in_flight(self) -> int:
        """Iterations in flight."""
        return self.n_workers or (self.num_stages if self.num_stages > 1 else self.fit.in_flight)

    def fits(self, system: System) -> bool:
        """False if the weights, or FasterTransformer's preallocation for `max_bs` requests, exceed the memory."""
        if POLICIES[system.kind].preallocates:
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
        raise ConfigError(
            f"{system.name} is out of memory with {place.model} on {place.device}", param="systems"
        )
    policy = POLICIES[system.kind]
    clock = VirtualClock()
    setting = Setting(
        system.max_bs, system.mbs, place.in_flight, place.num_stages, place.token_budget
    )
    scheduler = policy.make(setting)
    cost = policy.cost(cost_of(policy, place), setting, scheduler)
    executor = SimExecutor(cost, clock, lengths, num_stages=place.num_stages)
    n_slots = system.max_bs * LONGEST if policy.preallocates else place.num_slots
    rows = n_slots // FEWEST_SLOTS if policy.has_all_rows else system.max_bs * scheduler.n_workers
    kv = KVManager(
        (ceil_div(n_slots + rows * (PAGE_SIZE - 1), PAGE_SIZE),),
        PAGE_SIZE,
        rows,
        n_slots if scheduler.traits.has_reservations else None,
    )
    pool = RequestPool(kv, vocab_size=OTHER_ID + 1, max_model_len=LONGEST, eos_token_ids=(END_ID,))
    engine = Engine(
        executor, scheduler, pool, clock=clock, check_in_interval=place.check_in_interval
    )
    return Simulation(engine, executor, clock)


def cost_of(policy: Policy, place: Place) -> EngineCost:
    """The cost of a stage with an engine. FasterTransformer batches attention, since its batches have one shape."""
    if place.kernels is not None:
        return kernel_cost(place.model, place.kernels, is_batched=policy.is_paper_baseline)
    if not policy.is_paper_baseline:
        return place.cost
    cost = replace(place.cost, request=0.0)
    return cost.slower(place.fit.ft_factor) if place.num_stages > 1 else cost


def serve_system(
    system: System,
    place: Place,
    requests: Sequence[Lengths],
    arrivals: Sequence[float],
    *,
    has_gaps: bool = False,
) -> RunResult:
    """Serve all requests, and measure those after the warm-up.

    Raises:
        ConfigError: the model or the system does not fit into the memory.
    """
    lengths = {str(index): request.num_generated for index, request in enumerate(requests)}
    built = build(system, place, lengths)
    drive = Drive.in_virtual_time(built.engine, built.executor, built.clock)
    prompt = [1] * max([request.num_prompt for request in requests])
    prompts = [prompt[: request.num_prompt] for request in requests]
    return serve(drive, requests, prompts, arrivals, has_gaps=has_gaps)
