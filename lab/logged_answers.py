"""Runs logged word problems on an engine or a simulation of it; each answer has its natural length."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean, pstdev

from orca_jax.assembly.built import Built
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.assembly.support import check_settings
from orca_jax.engine import Engine
from orca_jax.helpers.reporting import percentile
from orca_jax.sched.observer import Observer
from orca_jax.sched.predict import EnginePredictor
from orca_jax.sim.cost import LinearCost
from orca_jax.sim.executor import END_ID, SimExecutor, VirtualClock
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.record import Recording
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.config import EngineConfig, ModelConfig
from orca_jax.values.errors import ConfigError, reason_of
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Executor


@dataclass(frozen=True)
class LoggedAnswers:
    """Prompts, with the numbers of tokens of their answers. The id of request n is str(n)."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    max_tokens: int  # of every request

    def draw(self, count: int, seed: int) -> "LoggedAnswers":
        """Draw `count` requests, with repetition."""
        which = random.Random(f"answers-{seed}").choices(range(len(self.prompts)), k=count)
        return LoggedAnswers(
            [self.prompts[i] for i in which], [self.lengths[i] for i in which], self.max_tokens
        )

    def by_name(self) -> dict[str, int]:
        """Return the lengths by request id, for an oracle."""
        return {str(n): length for n, length in enumerate(self.lengths)}


@dataclass(frozen=True)
class Served:
    """One pass. A latency is the seconds from the due time of a request to its last token."""

    latencies: Sequence[float]
    lengths: Sequence[int]
    wall: float

    @property
    def mean(self) -> float:
        """The mean latency."""
        return fmean(self.latencies)


def read_answers(path: str, max_tokens: int) -> LoggedAnswers:
    """Read a file written by `lab/measured/log_lengths.py`.

    Raises:
        ConfigError: the file is of another kind, holds fewer than 8 answers, or one longer than `max_tokens`.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        answers = LoggedAnswers(
            [line["prompt_ids"] for line in lines],
            [line["generated"] for line in lines],
            max_tokens,
        )
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {reason_of(error)}", param="log") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path!r} was not written by lab/measured/log_lengths.py: {error!r}", param="log"
        ) from error
    if len(answers.prompts) < 8 or max(answers.lengths) > max_tokens:
        message = f"{path!r} must hold at least 8 answers, none longer than {max_tokens} tokens (--max-tokens)"
        raise ConfigError(message, param="log")
    return answers


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Return Poisson arrivals in seconds; the first is at 0."""
    gaps = random.Random(f"gaps-{seed}")
    return [0.0, *accumulate(gaps.expovariate(rate) for _ in range(count - 1))]


class PassRunner:
    """Runs passes with different orderings and predictors on one built engine; executor and model stay the same."""

    def __init__(self, built: Built, config: EngineConfig) -> None:
        if built.executor_config is None:
            raise ConfigError(
                f"{config.model} answers no prompts; give a model with weights", param="model"
            )
        self._built = built
        self._resolved = built.executor_config
        self._config = config

    def real(
        self,
        answers: LoggedAnswers,
        arrivals: Sequence[float],
        policy: str,
        predictor: EnginePredictor,
    ) -> tuple[Served, Timeline]:
        """Run on the device in real time, sampling as the demo does. Return the pass with its timeline."""
        config = replace(self._config, scheduling_policy=policy)
        recording = Recording(replace(self._built.timeline_header, config=config))
        engine = self._engine(
            policy,
            predictor,
            self._built.model_config,
            self._built.engine.executor,
            time.monotonic,
            recording.writer,
        )
        served = _serve(Drive.in_real_time(engine), answers, arrivals)
        return served, recording.timeline

    def simulated(
        self,
        answers: LoggedAnswers,
        arrivals: Sequence[float],
        policy: str,
        predictor: EnginePredictor,
        cost: LinearCost,
    ) -> Served:
        """Simulate on a virtual clock; answers have their logged lengths."""
        clock = VirtualClock()
        executor = SimExecutor(cost, clock, answers.by_name())
        ends = replace(self._built.model_config, eos_token_ids=(END_ID,))
        engine = self._engine(policy, predictor, ends, executor, clock)
        return _serve(Drive.in_virtual_time(engine, executor, clock), answers, arrivals)

    def _engine(
        self,
        policy: str,
        predictor: EnginePredictor,
        model: ModelConfig,
        executor: Executor,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> Engine:
        choices = check_settings(replace(self._config, scheduling_policy=policy))
        resolved = self._resolved
        scheduler, pool = build_scheduling(
            choices,
            model,
            self._built.max_model_len,
            resolved.cache,
            resolved.buckets[-1],
            predictor,
        )
        return Engine(executor, scheduler, pool, clock=clock, observer=observer)


def _serve(drive: Drive, answers: LoggedAnswers, arrivals: Sequence[float]) -> Served:
    """Run all requests to their ends."""
    clock = drive.clock
    start = clock()
    ends: dict[str, float] = {}
    lengths: dict[str, int] = {str(n): 0 for n in range(len(arrivals))}

    def add(n: int, due: float) -> None:
        params = SamplingParams(max_tokens=answers.max_tokens, temperature=0.7, top_p=0.95, seed=n)
        drive.engine.add_request(str(n), answers.prompts[n], params)

    for updates in drive.serve([start + due for due in arrivals], add):
        for update in updates:
            lengths[update.request_id] += len(update.new_ids)
            if update.finish_reason is not None:
                assert update.error is None, update.error
                ends[update.request_id] = clock() - start
    latencies = [ends[str(n)] - due for n, due in enumerate(arrivals)]
    return Served(latencies, [lengths[str(n)] for n in range(len(arrivals))], clock() - start)


def latency_figures(served: Sequence[Served]) -> Mapping[str, float]:
    """Return figures of several passes: the mean of means, its standard deviation, p99 and maximum of all requests."""
    means = [one.mean for one in served]
    every = list(chain.from_iterable(one.latencies for one in served))
    return {
        "mean_latency_s": fmean(means),
        "spread_s": pstdev(means),
        "p99_latency_s": percentile(every, 99),
        "max_latency_s": max(every),
    }
