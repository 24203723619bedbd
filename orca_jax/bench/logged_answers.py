"""Logged word problems through an engine or a simulation of it, each request as long as its answer wants to be."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from orca_jax.bench.feed import advance, feed, sleep_until
from orca_jax.build.engine import Built
from orca_jax.build.scheduler import build_scheduling
from orca_jax.config import EngineConfig, ModelConfig, OrderingName
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.observer import Observer
from orca_jax.request import SamplingParams
from orca_jax.sched.predict import Predictor
from orca_jax.sim.cost import LinearCost
from orca_jax.sim.executor import END_ID, SimExecutor, VirtualClock
from orca_jax.step import Executor
from orca_jax.timeline.read import Timeline
from orca_jax.timeline.record import Recording


@dataclass(frozen=True)
class Answers:
    """What was asked, and how many tokens the answers had; request n is named str(n)."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    max_tokens: int  # everybody's

    def draw(self, count: int, seed: int) -> "Answers":
        """So many of them, some perhaps twice."""
        which = random.Random(f"answers-{seed}").choices(range(len(self.prompts)), k=count)
        return Answers([self.prompts[i] for i in which], [self.lengths[i] for i in which], self.max_tokens)

    def by_name(self) -> dict[str, int]:
        """Lengths, for an oracle."""
        return {str(n): length for n, length in enumerate(self.lengths)}


@dataclass(frozen=True)
class Served:
    """One pass. Latencies are seconds from when a request was due to its last token."""

    latencies: Sequence[float]
    lengths: Sequence[int]
    wall: float

    @property
    def mean(self) -> float:
        """Of the latencies."""
        return float(np.mean(self.latencies))


def read_answers(path: str, max_tokens: int) -> Answers:
    """What `scripts/log_lengths.py` has written. Raises ConfigError: the file is not that, or holds fewer than 8."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        answers = Answers([line["prompt_ids"] for line in lines], [line["generated"] for line in lines], max_tokens)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}", param="log") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path!r} is not what scripts/log_lengths.py writes: {error!r}", param="log") from error
    if len(answers.prompts) < 8 or max(answers.lengths) > max_tokens:
        message = f"{path!r} must hold at least 8 answers, none longer than {max_tokens} tokens (--max-tokens)"
        raise ConfigError(message, param="log")
    return answers


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrivals in seconds; the first is at 0."""
    gaps = random.Random(f"gaps-{seed}")
    return [0.0, *np.cumsum([gaps.expovariate(rate) for _ in range(count - 1)]).tolist()]


class Stage:
    """A built engine whose ordering and predictor are exchanged for every pass; executor and model stay."""

    def __init__(self, built: Built, config: EngineConfig) -> None:
        assert built.executor_config is not None, "the toy has no answers"
        self._built = built
        self._resolved = built.executor_config
        self._config = config

    def real(
        self, answers: Answers, arrivals: Sequence[float], policy: OrderingName, predictor: Predictor
    ) -> tuple[Served, Timeline]:
        """On the device, in real time, with the demo's own way of sampling; and what it wrote into its trace."""
        config = replace(self._config, scheduling_policy=policy)
        recording = Recording(replace(self._built.timeline_header, config=config))
        engine = self._engine(
            policy, predictor, self._built.model_config, self._built.engine.executor, time.monotonic, recording.writer
        )
        served = _serve(engine, answers, arrivals, time.monotonic, sleep_until)
        return served, recording.timeline

    def simulated(
        self, answers: Answers, arrivals: Sequence[float], policy: OrderingName, predictor: Predictor, cost: LinearCost
    ) -> Served:
        """On a virtual clock; answers are as long as they were."""
        clock = VirtualClock()
        executor = SimExecutor(cost, clock, answers.by_name())
        ends = replace(self._built.model_config, eos_token_ids=(END_ID,))
        engine = self._engine(policy, predictor, ends, executor, clock)

        return _serve(engine, answers, arrivals, clock, partial(advance, clock))

    def _engine(
        self,
        policy: OrderingName,
        predictor: Predictor,
        model: ModelConfig,
        executor: Executor,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> Engine:
        config, resolved = replace(self._config, scheduling_policy=policy), self._resolved
        scheduler, pool = build_scheduling(
            config, model, self._built.max_model_len, resolved.cache, resolved.buckets[-1], predictor
        )
        return Engine(executor, scheduler, pool, clock=clock, observer=observer)


def _serve(
    engine: Engine,
    answers: Answers,
    arrivals: Sequence[float],
    clock: Callable[[], float],
    wait_until: Callable[[float], None],
) -> Served:
    """Feed requests as they fall due, and step until all have ended."""
    start = clock()
    ends: dict[str, float] = {}
    lengths: dict[str, int] = {str(n): 0 for n in range(len(arrivals))}

    def add(n: int) -> None:
        params = SamplingParams(max_tokens=answers.max_tokens, temperature=0.7, top_p=0.95, seed=n)
        engine.add(str(n), answers.prompts[n], params)

    for updates in feed(engine, [start + due for due in arrivals], add, clock, wait_until):
        for update in updates:
            lengths[update.request_id] += len(update.new_ids)
            if update.finish_reason is not None:
                assert update.error is None, update.error
                ends[update.request_id] = clock() - start
    latencies = [ends[str(n)] - due for n, due in enumerate(arrivals)]
    return Served(latencies, [lengths[str(n)] for n in range(len(arrivals))], clock() - start)


def figures(served: Sequence[Served]) -> Mapping[str, float]:
    """Of several passes: the mean of means and its spread over passes, and the 99th percentile of all requests."""
    means = [one.mean for one in served]
    every = [latency for one in served for latency in one.latencies]
    return {
        "mean_latency_s": float(np.mean(means)),
        "spread_s": float(np.std(means)),
        "p99_latency_s": float(np.percentile(every, 99, method="inverted_cdf")),
        "max_latency_s": max(every),
    }
