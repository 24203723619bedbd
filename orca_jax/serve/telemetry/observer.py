"""Observability for operators: metrics, and a log line and a span for every request of the engine."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from orca_jax.engine import HOST_PARTS, EngineStats, totals
from orca_jax.link.wire import Heartbeat
from orca_jax.serve.telemetry.metrics import (
    END_REASONS,
    ENGINE_STATES,
    EngineSeries,
    Metrics,
    SpeculationSeries,
)
from orca_jax.serve.telemetry.otel import RequestEnd, Tracing
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import MAX_LORAS
from orca_jax.values.request import RequestMetrics, RequestUpdate
from orca_jax.values.startup import EngineSummary

# only complete requests count for the latency of the server
COMPLETE = frozenset({"stop", "length", "tool_calls"})

logger = logging.getLogger(__name__)


class EngineView(Protocol):
    """The state of the engine in the front end, known also while the engine is silent."""

    @property
    def state(self) -> str:
        """One of `ENGINE_STATES`."""
        ...

    @property
    def running(self) -> int:
        """Number of requests with a row."""
        ...

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        ...

    @property
    def self_tests(self) -> Mapping[str, str]:
        """Results of the attention kernels' self-test by implementation."""
        ...

    @property
    def summary(self) -> EngineSummary | None:
        """Settings and start of the last engine that was ready."""
        ...


class RequestRecord:
    """Observes one request of the engine, from `ServerObserver.begin` to `end`. Belongs to the event loop's thread."""

    def __init__(
        self, observer: "ServerObserver", request_id: str, endpoint: str, num_prompt_tokens: int
    ) -> None:
        self._observer = observer
        self._request_id = request_id
        self._call_id: str = structlog.contextvars.get_contextvars().get("request_id", request_id)
        self._endpoint = endpoint
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._clock = observer.clock
        self._begun = self._clock()
        self._first: float | None = None
        self._last = 0.0
        self._times: RequestMetrics | None = None
        self._ended = False
        self._gaps = observer.metrics.requests.token_gap.of()
        self._span = (
            None if observer.tracing is None else observer.tracing.begin(request_id, endpoint)
        )

    def take_update(self, update: RequestUpdate) -> None:
        """Count the tokens of an update; runs for every token."""
        if update.metrics is not None:
            self._times = update.metrics
        count = len(update.new_ids)
        if not count:
            if update.pooled is not None:
                self._take_first(self._clock())
            return
        now = self._clock()
        if self._first is None:
            self._take_first(now)
        else:
            self._gaps.observe((now - self._last) / count, count)
        self._last = now
        self._num_tokens += count
        self._observer.metrics.requests.generation_tokens.increase(count)

    def end(self, reason: str) -> None:
        """Record the end, for one of `END_REASONS`. Only the first call counts."""
        assert reason in END_REASONS, f"{reason!r} is not one of {END_REASONS}"
        if self._ended:
            return
        self._ended = True
        times = self._times
        now = self._clock()
        end = RequestEnd(
            reason,
            self._num_prompt_tokens,
            self._num_tokens,
            queued=None if times is None else times.first_scheduled - times.arrival,
            first_token=None if self._first is None else self._first - self._begun,
            duration=now - self._begun,
        )
        self._observer.request_ended(end)
        self._log(end)
        if self._span is not None and self._observer.tracing is not None:
            self._observer.tracing.end(self._span, end)

    def _take_first(self, now: float) -> None:
        self._first = now
        requests = self._observer.metrics.requests
        requests.first_token.of().observe(now - self._begun)
        requests.prompt_tokens.increase(self._num_prompt_tokens)

    def _log(self, end: RequestEnd) -> None:
        if not self._observer.logs_requests:
            return
        fields: dict[str, object] = {
            "request_id": self._call_id,
            "endpoint": self._endpoint,
            "finish_reason": end.reason,
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "duration_ms": round(end.duration * 1e3, 3),
        }
        if self._request_id != self._call_id:
            fields["choice_id"] = self._request_id
        if end.queued is not None:
            fields["queue_ms"] = round(end.queued * 1e3, 3)
        if end.first_token is not None:
            fields["ttft_ms"] = round(end.first_token * 1e3, 3)
        if self._first is not None and self._num_tokens > 1 and self._last > self._first:
            fields["tokens_per_s"] = round((self._num_tokens - 1) / (self._last - self._first), 2)
        logger.info("request ended", extra=fields)


class ServerObserver:
    """Metrics, logs and traces of one server. Belongs to the event loop's thread.

    Args:
        config: `log_requests` and the model's name.
        tracing: exports spans; the caller closes it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: ServerConfig,
        tracing: Tracing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = config.names[0]
        self._settings = config.engine
        self.metrics = Metrics(self._model)
        self.tracing = tracing
        self.clock = clock
        self.logs_requests = config.log_requests
        self._max_loras = (config.engine.max_loras or MAX_LORAS) if config.engine.enable_lora else 0
        self._registry = CollectorRegistry()
        self._registry.register(self.metrics)
        ProcessCollector(registry=self._registry)
        self._engine: EngineView | None = None
        self._totals = _EngineTotals(self.metrics.engine, self.metrics.speculation, self._model)
        self._last_beat: tuple[float, Heartbeat] | None = None
        self._open_calls = 0

    def follow(self, engine: EngineView) -> None:
        """Read state, running and waiting requests from `engine`, which is more current than the last heartbeat."""
        self._engine = engine

    def begin(self, request_id: str, endpoint: str, num_prompt_tokens: int) -> RequestRecord:
        """Begin the record of one request, one for each choice of a call. The caller must end it."""
        return RequestRecord(self, request_id, endpoint, num_prompt_tokens)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Take the next heartbeat of the engine."""
        self._last_beat = self.clock(), beat
        self._totals.take_beat(beat)

    def continued_trace(
        self, headers: Iterable[tuple[bytes, bytes]]
    ) -> AbstractContextManager[None]:
        """A context whose requests become part of the caller's trace."""
        if self.tracing is None:
            return nullcontext()
        return self.tracing.continued(headers)

    def call_started(self) -> None:
        """Count an HTTP call that has begun."""
        self._open_calls += 1

    def call_ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP call that was answered or given up by its client. The labels need a bounded set of values."""
        self._open_calls -= 1
        self.metrics.http.requests.increase(1, (method, route, str(status)))
        self.metrics.http.duration.of((method, route)).observe(seconds)

    def fields_ignored(self, names: Iterable[str]) -> None:
        """Count a call with ignored fields. The names need a bounded set of values."""
        for name in names:
            self.metrics.http.ignored_fields.increase(1, (name,))

    def decided(self, kind: str, label_mass: float) -> None:
        """Count an answered question."""
        self.metrics.http.decisions.increase(1, (kind,))
        self.metrics.http.label_mass.of().observe(label_mass)

    def request_ended(self, end: RequestEnd) -> None:
        """Count the end of a request of the engine."""
        requests = self.metrics.requests
        requests.ended.increase(1, (end.reason,))
        if end.queued is not None:
            requests.queued.of().observe(end.queued)
        if end.reason in COMPLETE:
            self._completed(end)

    def _completed(self, end: RequestEnd) -> None:
        requests = self.metrics.requests
        requests.duration.of().observe(end.duration)
        requests.prompt_lengths.of().observe(end.prompt_tokens)
        requests.lengths.of().observe(end.completion_tokens)
        if end.queued is None or end.first_token is None:
            return  # it needed no token
        decode = end.duration - end.first_token
        requests.prefill.of().observe(end.first_token - end.queued)
        requests.decode.of().observe(decode)
        requests.inference.of().observe(end.duration - end.queued)
        if end.completion_tokens > 1:
            requests.mean_gap.of().observe(decode / (end.completion_tokens - 1))

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        self._refresh()
        return generate_latest(self._registry)

    def _refresh(self) -> None:
        """Set the gauges to the current values."""
        engine = self.metrics.engine
        gateway = self.metrics.gateway
        self.metrics.http.open.set(self._open_calls)
        at, beat = self._last_beat or (self.clock(), Heartbeat("loading", 0.0))
        stats = beat.engine or EngineStats()
        state = {"serving": "ready"}.get(beat.phase, beat.phase)
        running = stats.running
        waiting = stats.waiting
        if self._engine is not None:
            state = self._engine.state
            running = self._engine.running
            waiting = self._engine.waiting
            engine.self_test.clear()
            for test in self._engine.self_tests.items():
                engine.self_test.set(1, test)
            if self._engine.summary is not None:
                engine.show(self._engine.summary)
                gateway.show(self._engine.summary, self._settings)
        if state in ("restarting", "dead"):
            stats = EngineStats()
        used = stats.num_pages - stats.free_pages
        for name in ENGINE_STATES:
            engine.state.set(name == state, (name,))
        engine.heartbeat_age.set(self.clock() - at)
        engine.busy.set(beat.busy_seconds)
        engine.pages_total.set(stats.num_pages)
        engine.pages_used.set(used)
        engine.group_blocks.clear()
        for group, blocks in enumerate(stats.group_blocks):
            engine.group_blocks.set(blocks, (str(group),))
        engine.state_blocks.clear()
        uses = ("requests", "snapshots", "unused")
        for use, blocks in zip(uses, stats.state_blocks, strict=False):
            engine.state_blocks.set(blocks, (use,))
        if self._max_loras:
            loras = stats.running_loras, stats.waiting_loras
            gateway.show_loras(self._max_loras, *loras, time.time())
        engine.running.set(running)
        engine.waiting.set(waiting)
        engine.kv_usage.set(used / max(1, stats.num_pages))


class _EngineTotals:
    """Adds up the totals of one engine after another: those of a new engine begin at 0, the sums never fall.

    The work of an engine between its last heartbeat and its death is lost.
    """

    def __init__(self, series: EngineSeries, speculation: SpeculationSeries, model: str) -> None:
        self._series = series
        self._speculation = speculation
        self._model = model
        self._has_served = False
        self._last: dict[str, float] = {}

    def take_beat(self, beat: Heartbeat) -> None:
        """Take the next heartbeat, of the same engine or of a new one."""
        if beat.engine is None or beat.executor is None:
            if self._has_served:
                self._restart()
            return
        current = totals(beat.engine, beat.executor)
        if any(value < self._last.get(name, 0) for name, value in current.items()):
            self._restart()
        self._has_served = True
        grown = {name: value - self._last.get(name, 0) for name, value in current.items()}
        self._last = current
        self._add(grown)

    def _restart(self) -> None:
        self._series.restarts.increase()
        self._has_served = False
        self._last = {}

    def _add(self, grown: dict[str, float]) -> None:
        series = self._series
        for name, counter in series.totals.items():
            counter.increase(grown[name])
        series.add_plans(grown)
        self._speculation.add_growth(grown, self._model)
        for part in HOST_PARTS:
            series.host_seconds.increase(grown[f"{part}_seconds"], (part,))
        if grown["iterations"]:
            # Without dispatch: on some backends it runs the program.
            host = grown["schedule_seconds"] + grown["update_seconds"] + grown["pack_seconds"]
            series.host_per_iteration.set(host / grown["iterations"])
