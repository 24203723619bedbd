"""The prediction of a run of a real engine: the same requests, arrivals and scheduler on a simulated device."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from lab.paper.runs import Lengths, RunResult, scaled, serve
from lab.paper.systems import System
from lab.real.laboratory import Laboratory, prompts_of, settings_of
from lab.simulated.cost import FeatureCost
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.assembly.support import check_settings
from orca_jax.engine import Engine
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sim.executor import END_ID, SimExecutor, VirtualClock
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.timeline.measure import Timeline
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.config import ModelConfig


def skewed_lengths(count: int, seed: int, scale: float) -> list[Lengths]:
    """Many short requests and few long ones: exponential lengths within the bounds of the paper's workload.

    Prompts have 32 tokens and 120 more on average, outputs 1 and 40 more, cut at 512 and 128; all multiplied by
    `scale`.
    """
    dice = random.Random(f"skewed-lengths-{seed}")

    def draw(least: int, mean: int, most: int) -> int:
        return min(
            scaled(least, scale) + int(scale * dice.expovariate(1 / mean)), scaled(most, scale)
        )

    drawn = [(draw(32, 120, 512), draw(1, 40, 128)) for _ in range(count)]
    return [Lengths(num_prompt, generated, generated) for num_prompt, generated in drawn]


def predicted_run(
    laboratory: Laboratory,
    system: System,
    cost: FeatureCost,
    requests: Sequence[Lengths],
    arrivals: Sequence[float],
    seed: int,
) -> RunResult:
    """Serve the requests in virtual time; scheduler, pool, memory and token budget are those of the laboratory.

    Raises:
        ConfigError: a setting is wrong.
    """
    settings = settings_of(system, laboratory.config)
    head = laboratory.header
    assert head is not None, "a laboratory without timelines"
    laboratory.reschedule(settings)
    real = laboratory.engine.scheduler
    budget = real.token_budget if isinstance(real, ChunkedScheduler) else head.budget
    model = replace(TOY_MODEL, vocab_size=laboratory.vocab_size, eos_token_ids=(END_ID,))
    scheduler, pool = build_scheduling(
        check_settings(settings), model, laboratory.max_model_len, head.cache, budget
    )
    clock = VirtualClock()
    lengths = {str(index): request.num_generated for index, request in enumerate(requests)}
    executor = SimExecutor(
        replace(cost, buckets=head.buckets), clock, lengths, groups=head.cache.groups
    )
    engine = Engine(
        executor, scheduler, pool, clock=clock, check_in_interval=settings.check_in_interval
    )
    drive = Drive.in_virtual_time(engine, executor, clock)
    return serve(
        drive, requests, prompts_of(requests, laboratory.vocab_size, seed), arrivals, has_gaps=True
    )


def launch_overhead(timelines: Iterable[Timeline]) -> float:
    """Seconds of an iteration that no model saves: a low quantile of the time to pack and submit one."""
    iterations = chain.from_iterable(timeline.iterations for timeline in timelines)
    taken = sorted(each.submitted - each.planned for each in iterations)
    return taken[len(taken) // 10] if taken else 0.0


def scaled_cost(
    cost: FeatureCost, fitted: ModelConfig, other: ModelConfig, overhead: float = 0.0
) -> FeatureCost:
    """The cost of another model on the same device: each weight times the ratio of the work that it stands for.

    A step or a launch reads all weights; a token multiplies those of the layers, a pair or a token of context reads
    keys and values, a row of the sampler multiplies the unembedding. The host's time is the same, and so are `overhead`
    seconds of each step.
    """
    mine = _work(fitted)
    theirs = _work(other)
    ratios = {name: theirs[name] / mine[name] for name in mine}
    fixed = {"steps": min(overhead, cost.weights.get("steps", 0.0))}
    weights = {
        name: fixed.get(name, 0.0) + (weight - fixed.get(name, 0.0)) * ratios[_KINDS[name]]
        for name, weight in cost.weights.items()
    }
    return replace(cost, weights=weights)


_KINDS = {
    "steps": "weights", "launches": "weights", "tokens": "layers", "tokens_from_4": "layers",
    "tokens_from_16": "layers", "tokens_from_64": "layers", "chunk_tokens": "layers",
    "increments": "layers", "chunk_pairs": "attention", "chunk_context": "attention", "context": "attention",
    "sampler_rows": "unembedding",
}  # fmt: skip


def _work(model: ModelConfig) -> dict[str, float]:
    """Parameters and widths by the kind of work."""
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    mlp = (3 if model.gated_mlp else 2) * model.embed_dim * model.mlp_dim
    layers = float(model.num_layers * (attention + mlp))
    unembedding = float(model.vocab_size * model.embed_dim)
    return {
        "weights": layers + unembedding,
        "layers": layers,
        "attention": float(model.num_layers * model.num_heads * model.head_dim),
        "unembedding": unembedding,
    }
