"""What is counted, under which names: the metrics of `/metrics`.

The library writes the text; counting is done here, as its own counters take a lock at every call and publish a
`_created` series beside each. All of it belongs to one thread, the event loop's.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from orca_jax.engine import HOST_PARTS

PREFIX = "orca_jax_"
Labels = tuple[str, ...]

TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
FIRST_TOKENS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
DURATIONS = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 900, 3600)
CALLS = (0.005, 0.05, 0.5, 5, 30, 120, 600)  # few: there are as many series for each route

ENGINE_STATES = ("loading", "compiling", "ready", "draining", "stopping", "hung", "dead")
END_REASONS = ("stop", "length", "tool_calls", "abort", "error", "timeout")


class Instrument(Protocol):
    """Whatever has samples to publish."""

    def family(self) -> Metric:
        """Its samples of this moment."""
        ...


class Counter:
    """A total that only grows; one for each combination of label values that was met."""

    def __init__(self, name: str, text: str, labels: Labels = (), known: Sequence[Labels] = ()) -> None:
        self._name, self._text, self._labels = PREFIX + name, text, labels
        self._values: dict[Labels, float] = dict.fromkeys(known if labels else [()], 0)

    def add(self, amount: float = 1, labels: Labels = ()) -> None:
        """Count; `labels` in the order of their names."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def family(self) -> Metric:
        """Its samples of this moment."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Gauge:
    """A value of this moment."""

    def __init__(self, name: str, text: str, labels: Labels = (), *, prefix: str = PREFIX) -> None:
        self._name, self._text, self._labels = prefix + name, text, labels
        self._values: dict[Labels, float] = {} if labels else {(): 0}

    def set(self, value: float, labels: Labels = ()) -> None:
        """Replace it; `labels` in the order of their names."""
        self._values[labels] = value

    def family(self) -> Metric:
        """Its samples of this moment."""
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Distribution:
    """How often values fell between bounds. `observe` runs for every generated token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Labels) -> None:
        """Publish: Prometheus wants the counts up to each bound."""
        below, buckets = 0, []
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric(labels, buckets, self._sum)


class Histogram:
    """Distributions, one for each combination of label values that was met."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        self._name, self._text, self._labels = PREFIX + name, text, labels
        self._bounds = bounds
        self._children: dict[Labels, Distribution] = {} if labels else {(): Distribution(bounds)}

    def of(self, labels: Labels = ()) -> Distribution:
        """The distribution of these label values."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Distribution(self._bounds)
        return child

    def family(self) -> Metric:
        """Its samples of this moment."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, child in self._children.items():
            child.add_to(family, labels)
        return family


class RequestSeries:
    """Of the engine's requests; a call with several prompts or choices has as many."""

    def __init__(self) -> None:
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens of requests that got their first token.")
        self.generation_tokens = Counter("generation_tokens_total", "Generated tokens that the engine handed out.")
        self.ended = Counter(
            "request_success_total",
            "Requests that ended, by reason; vLLM's name, though errors, time-outs and hang-ups are counted too.",
            ("finished_reason",),
            [(reason,) for reason in END_REASONS],
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From the submission to the engine to the first token.", FIRST_TOKENS
        )
        self.token_gap = Histogram("inter_token_latency_seconds", "Between a request's generated tokens.", TOKEN_GAPS)
        self.duration = Histogram(
            "e2e_request_latency_seconds",
            "From the submission to the engine to the end, of requests that came to theirs.",
            DURATIONS,
        )
        self.queued = Histogram(
            "request_queue_time_seconds", "From the engine's door to the first iteration.", FIRST_TOKENS
        )


class EngineSeries:
    """Of the engine process, as its heartbeats tell; totals go on over restarts."""

    def __init__(self) -> None:
        self.running = Gauge("num_requests_running", "Requests with a row of the batch.")
        self.waiting = Gauge("num_requests_waiting", "Requests that wait for a row.")
        self.kv_usage = Gauge("kv_cache_usage_perc", "Share of the pages of K and V in use; 1 is all of them.")
        self.pages_used = Gauge("kv_pages_used", "Pages of K and V in use.")
        self.pages_total = Gauge("kv_pages", "Pages of K and V that there are.")
        self.host_per_iteration = Gauge(
            "host_seconds_per_iteration",
            "Python's time for an iteration, mean between the last two heartbeats with iterations.",
        )
        self.state = Gauge("engine_state", "1 for the state in which the engine is, 0 for the others.", ("state",))
        self.heartbeat_age = Gauge("engine_heartbeat_age_seconds", "Since the engine last said that it lives.")
        self.busy = Gauge("engine_busy_seconds", "For which the engine had been in its step at its last heartbeat.")
        self.restarts = Counter("engine_restarts_total", "Engines that were started after the first.")
        # By the name of the total in `orca_jax.engine.totals`; those without a counter are not published.
        self.totals = {
            "iterations": Counter("iterations_total", "Iterations of the engine."),
            "tokens": Counter("iteration_tokens_total", "Tokens that iterations processed, padding apart."),
            "padding_tokens": Counter("padding_tokens_total", "Tokens of padding that iterations processed."),
            "launches": Counter("launches_total", "Programs run on the device."),
            "preemptions": Counter("num_preemptions_total", "Requests that gave their pages back to others."),
            "cache_queries": Counter("prefix_cache_queries_total", "Prompt tokens of requests that began to run."),
            "cache_hits": Counter("prefix_cache_hits_total", "Those of them whose pages an earlier request had left."),
            "compiles": Counter("compiles_total", "Programs that XLA compiled or took from its cache."),
            "compiles_while_serving": Counter(
                "compiles_while_serving_total", "Those of them after the start: defects."
            ),
            "idle_seconds": Counter(
                "device_idle_seconds_total", "For which the device had nothing to do while there was work, at most."
            ),
        }
        self.host_seconds = Counter(
            "engine_seconds_total",
            "Time of the engine's thread, by what it did.",
            ("part",),
            [(part,) for part in HOST_PARTS],
        )


class HttpSeries:
    """Of HTTP calls, by route and never by path, so that callers cannot make series."""

    def __init__(self) -> None:
        self.requests = Counter("http_requests_total", "Answered calls.", ("method", "route", "status"))
        self.duration = Histogram(
            "http_request_duration_seconds", "From a call's headers to its last byte.", CALLS, ("method", "route")
        )
        self.open = Gauge("http_requests_open", "Calls that are being answered.")
        self.tasks = Gauge("event_loop_tasks", "Tasks of the front end's event loop; flat while nobody calls.")


class GatewaySeries:
    """What the Kubernetes inference gateway asks for, under the names for which it looks by default."""

    def __init__(self) -> None:
        names: Labels = ("model_name",)
        self.running = Gauge("num_requests_running", "As orca_jax_num_requests_running.", names, prefix="vllm:")
        self.waiting = Gauge("num_requests_waiting", "As orca_jax_num_requests_waiting.", names, prefix="vllm:")
        self.kv_usage = Gauge("kv_cache_usage_perc", "As orca_jax_kv_cache_usage_perc.", names, prefix="vllm:")


class Metrics:
    """All of them: a collector for a registry of `prometheus_client`."""

    def __init__(self) -> None:
        self.requests = RequestSeries()
        self.engine = EngineSeries()
        self.http = HttpSeries()
        self.gateway = GatewaySeries()

    def collect(self) -> Iterator[Metric]:
        """The registry's question."""
        for group in (self.requests, self.engine, self.http, self.gateway):
            for value in vars(group).values():
                instruments: Iterable[Instrument] = value.values() if isinstance(value, dict) else (value,)
                yield from (instrument.family() for instrument in instruments)
