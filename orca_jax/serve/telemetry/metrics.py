"""The metrics of `/metrics` and their names. They belong to the event loop's thread."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from prometheus_client.metrics_core import Metric

from orca_jax.engine import ACCEPTED_PER_POS, HOST_PARTS, PLAN_TOKENS, PLANS_BY_TOKENS
from orca_jax.serve.telemetry.instruments import Counter, Gauge, Histogram, Instrument
from orca_jax.values.config import GPU_MEMORY_UTILIZATION, EngineConfig
from orca_jax.values.startup import EngineSummary

TOKEN_GAPS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
)
FIRST_TOKENS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
DURATIONS = (
    0.005,
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
    900,
    3600,
)
MASSES = (0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
# tokens of a request
COUNTS = tuple(digit * 10**power for power, digit in product(range(6), (1, 2, 5)))
CALLS = (0.005, 0.05, 0.5, 5, 30, 120, 600)  # few bounds, since every route has a series for each

ENGINE_STATES = (
    "loading",
    "compiling",
    "ready",
    "draining",
    "stopping",
    "restarting",
    "hung",
    "dead",
)
# The metrics of vLLM with the meaning of ours, after its prefix, by the name of ours.
TWINS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    **{
        name: {name: {}}
        for name in (
            *(
                "prompt_tokens_total",
                "generation_tokens_total",
                "request_success_total",
                "request_prompt_tokens",
            ),
            *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
            *(
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
            ),
            *(
                "request_inference_time_seconds",
                "request_time_per_output_token_seconds",
                "num_requests_running",
            ),
            "num_preemptions_total",
        )
    },
    # With the names of earlier versions, which dashboards still ask for.
    "inter_token_latency_seconds": {
        "inter_token_latency_seconds": {},
        "time_per_output_token_seconds": {},
    },
    "kv_cache_usage_perc": {"kv_cache_usage_perc": {}, "gpu_cache_usage_perc": {}},
    "prefix_cache_queries_total": {
        "prefix_cache_queries_total": {},
        "gpu_prefix_cache_queries_total": {},
    },
    "prefix_cache_hits_total": {"prefix_cache_hits_total": {}, "gpu_prefix_cache_hits_total": {}},
    "tokens_per_iteration": {"iteration_tokens_total": {}},  # a histogram in vLLM
    "request_generation_tokens": {
        "request_generation_tokens": {},
        "request_max_num_generation_tokens": {},
    },
    "num_requests_waiting": {
        "num_requests_waiting": {},
        "num_requests_waiting_by_reason": {"reason": "capacity"},
    },
}
VLLM = "vllm:"
MODEL_LABELS = ("model_name", "engine")
ENGINE = "0"  # the rank among data-parallel engines: a server has one
CACHE_LABELS = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "engine", "gpu_memory_utilization"),
    *("kv_cache_size_tokens", "num_gpu_blocks", "num_gpu_blocks_override"),
)
INFO_LABELS = ("device", "num_devices", "dtype", "kv_cache_dtype", "attention", "scheduler")
END_REASONS = ("stop", "length", "tool_calls", "abort", "error", "timeout")


class RequestSeries:
    """Metrics of the engine's requests; a call has one request for each prompt and choice.

    Queue, prefill and decode of a request add up to its latency.
    """

    def __init__(self) -> None:
        self.prompt_tokens = Counter(
            "prompt_tokens_total", "Prompt tokens of requests that got their first token."
        )
        self.generation_tokens = Counter(
            "generation_tokens_total", "Generated tokens returned by the engine."
        )
        self.ended = Counter(
            "request_success_total",
            "Ended requests by reason. The name is vLLM's; errors, timeouts and aborts are counted, too.",
            ("finished_reason",),
            [(reason,) for reason in END_REASONS],
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "Time from the submission to the engine until the first token.",
            FIRST_TOKENS,
        )
        self.token_gap = Histogram(
            "inter_token_latency_seconds",
            "Time between two generated tokens of a request.",
            TOKEN_GAPS,
        )
        self.duration = Histogram(
            "e2e_request_latency_seconds",
            "Time from the submission to the engine until the end, of complete requests.",
            DURATIONS,
        )
        self.queued = Histogram(
            "request_queue_time_seconds",
            "Time from the arrival in the engine until the first iteration.",
            FIRST_TOKENS,
        )
        self.prompt_lengths = Histogram(
            "request_prompt_tokens", "Prompt tokens of a complete request.", COUNTS
        )
        self.lengths = Histogram(
            "request_generation_tokens", "Generated tokens of a complete request.", COUNTS
        )
        self.prefill = Histogram(
            "request_prefill_time_seconds",
            "Time from the first iteration until the first token.",
            DURATIONS,
        )
        self.decode = Histogram(
            "request_decode_time_seconds",
            "Time from the first token until the end, of complete requests.",
            DURATIONS,
        )
        self.inference = Histogram(
            "request_inference_time_seconds",
            "Time from the first iteration until the end, of complete requests.",
            DURATIONS,
        )
        self.mean_gap = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time between two generated tokens, of complete requests.",
            TOKEN_GAPS,
        )


def _totals() -> dict[str, Counter]:
    """Counters by the name of the total in `orca_jax.engine.totals`; those without one are not published."""
    return {
        "iterations": Counter("iterations_total", "Iterations of the engine."),
        "tokens": Counter(
            "iteration_tokens_total", "Tokens processed by iterations, without padding."
        ),
        "padding_tokens": Counter(
            "padding_tokens_total", "Padding tokens processed by iterations."
        ),
        "launches": Counter("launches_total", "Programs run on the device."),
        "preemptions": Counter(
            "num_preemptions_total", "Preempted requests: their pages went to other requests."
        ),
        "cache_queries": Counter(
            "prefix_cache_queries_total", "Prompt tokens of requests that began to run."
        ),
        "cache_hits": Counter(
            "prefix_cache_hits_total", "Prompt tokens found in pages of another request."
        ),
        "saved_pages": Counter("kv_pages_saved_total", "Pages saved outside of the devices."),
        "restored_pages": Counter(
            "kv_pages_restored_total", "Pages that came back from there to the prefix cache."
        ),
        "failed_pages": Counter(
            "kv_pages_failed_total", "Pages that could not be saved there, or not be read."
        ),
        "compiles": Counter("compiles_total", "Programs compiled by XLA or loaded from its cache."),
        "compiles_while_serving": Counter(
            "compiles_while_serving_total", "Programs compiled late: a defect."
        ),
        "overruled_decisions": Counter(
            "overruled_decisions_total", "Decisions of your policy that were changed."
        ),
        "slow_decisions": Counter("slow_decisions_total", "Decisions of your policy above 10 ms."),
        "late_grammars": Counter(
            "late_grammars_total", "Calls that failed, since their grammar took over 60 s."
        ),
        "late_adapters": Counter(
            "late_adapters_total", "Calls that failed, since their adapter took over 60 s."
        ),
        "idle_seconds": Counter(
            "device_idle_seconds_total",
            "Upper bound of the time of an idle device while there was work.",
        ),
    }


class EngineSeries:
    """Metrics of the engine process, from its heartbeats; totals continue after a restart."""

    def __init__(self) -> None:
        self.running = Gauge("num_requests_running", "Requests with a row in the batch.")
        self.waiting = Gauge("num_requests_waiting", "Requests waiting for a row.")
        self.kv_usage = Gauge("kv_cache_usage_perc", "Fraction of KV cache pages in use, 0 to 1.")
        self.pages_used = Gauge("kv_pages_used", "KV cache pages in use.")
        self.pages_total = Gauge("kv_pages", "KV cache pages in total.")
        self.group_blocks = Gauge(
            "kv_group_blocks", "KV cache blocks of requests, by group of layers.", ("group",)
        )
        self.state_blocks = Gauge(
            "kv_state_blocks",
            "Blocks of recurrent states: of running requests, snapshots, and unused ones.",
            ("use",),
        )
        self.host_per_iteration = Gauge(
            "host_seconds_per_iteration",
            "Mean host time of an iteration in Python, between the last two heartbeats with iterations.",
        )
        self.state = Gauge(
            "engine_state", "1 for the current state of the engine, 0 for the others.", ("state",)
        )
        self.heartbeat_age = Gauge(
            "engine_heartbeat_age_seconds", "Time since the last heartbeat of the engine."
        )
        self.busy = Gauge(
            "engine_busy_seconds",
            "Time without progress of an engine with work, at the last heartbeat.",
        )
        self.self_test = Gauge(
            "attention_self_test",
            "1 for the result of each attention implementation tested at the start of the engine.",
            ("implementation", "result"),
        )
        self.info = Gauge(
            "engine_info", "1, with resolved settings of the engine as labels.", INFO_LABELS
        )
        self.token_budget = Gauge(
            "token_budget", "Most tokens of one launch; with scheduler chunked, of one iteration."
        )
        self.start_seconds = Gauge(
            "start_seconds",
            "Time in each phase of the engine's start; phases may overlap.",
            ("phase",),
        )
        self.start_total = Gauge(
            "start_total_seconds",
            "Time from the server's first statement until its engine was built; after a restart, from the new process.",
        )
        self.start_programs = Gauge(
            "start_programs", "Programs of the engine by their source.", ("source",)
        )
        self.restarts = Counter("engine_restarts_total", "Restarts of the engine.")
        self.totals = _totals()
        self.plan_tokens = Histogram(
            "tokens_per_iteration", "Tokens of an iteration, without padding.", PLAN_TOKENS
        )
        self.host_seconds = Counter(
            "engine_seconds_total",
            "Time of the engine's thread, by part of the iteration.",
            ("part",),
            [(part,) for part in HOST_PARTS],
        )

    def add_plans(self, grown: Mapping[str, float]) -> None:
        """Add the iterations since the last heartbeat, by their tokens."""
        counts = [
            grown.get(f"{PLANS_BY_TOKENS}_{place}", 0) for place in range(len(PLAN_TOKENS) + 1)
        ]
        self.plan_tokens.of().add_counts(counts, grown["scheduled_tokens"])

    def show(self, summary: EngineSummary) -> None:
        """Set the gauges of resolved settings and of the start."""
        start = summary.start
        self.info.clear()
        self.info.set(1, tuple(str(getattr(summary, label)) for label in INFO_LABELS))
        self.token_budget.set(summary.token_budget)
        self.start_total.set(start.total)
        for phase, seconds in start.seconds.items():
            self.start_seconds.set(seconds, (phase,))
        self.start_programs.set(start.programs - start.from_cache, ("compiled",))
        self.start_programs.set(start.from_cache, ("cache",))


class HttpSeries:
    """Metrics of HTTP calls, by route and never by path, so that callers cannot create series."""

    def __init__(self) -> None:
        self.requests = Counter(
            "http_requests_total", "Answered HTTP calls.", ("method", "route", "status")
        )
        self.ignored_fields = Counter(
            "ignored_fields_total",
            "Calls with a field that was ignored, by field; other: fields accepted only by --unknown-fields ignore.",
            ("field",),
        )
        self.decisions = Counter(
            "decisions_total", "Questions answered by decisions, by their type.", ("type",)
        )
        self.label_mass = Histogram(
            "decision_label_mass",
            "Probability of all labels of a question together: a low one means that the model would answer otherwise.",
            MASSES,
        )
        self.duration = Histogram(
            "http_request_duration_seconds",
            "Time from the headers of an HTTP call to the last byte of the answer.",
            CALLS,
            ("method", "route"),
        )
        self.open = Gauge("http_requests_open", "Open HTTP calls.")
        self.tasks = Gauge(
            "event_loop_tasks", "Tasks of the front end's event loop; constant without calls."
        )


class GatewaySeries:
    """Metrics of vLLM that only the Kubernetes inference gateway reads, under its default names."""

    def __init__(self) -> None:
        self.cache_config = Gauge(
            "cache_config_info",
            "1, with settings of the KV cache as labels: tokens of a page, pages, and what they come from.",
            CACHE_LABELS,
            prefix=VLLM,
        )
        self.loras = Gauge(
            "lora_requests_info",
            "Time of the last change in seconds since 1970, with the adapters of running and waiting requests.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            prefix=VLLM,
        )

    def show_loras(
        self, most: int, running: Sequence[str], waiting: Sequence[str], now: float
    ) -> None:
        """Set the gauge of the adapters, unless nothing has changed."""
        labels = str(most), ",".join(running), ",".join(waiting)
        if not self.loras.has(labels):
            self.loras.clear()
            self.loras.set(now, labels)

    def show(self, summary: EngineSummary, config: EngineConfig) -> None:
        """Set the gauge of the resolved settings; `config` has the given ones."""
        share = config.gpu_memory_utilization
        values = {
            "block_size": summary.page_size,
            "cache_dtype": summary.kv_cache_dtype,
            "enable_prefix_caching": summary.reuses_prefixes,
            "engine": ENGINE,
            "gpu_memory_utilization": GPU_MEMORY_UTILIZATION if share is None else share,
            "kv_cache_size_tokens": summary.kv_tokens,
            "num_gpu_blocks": summary.num_pages,
            "num_gpu_blocks_override": config.num_pages,
        }
        self.cache_config.clear()
        self.cache_config.set(1, tuple(str(values[label]) for label in CACHE_LABELS))


class SpeculationSeries:
    """Totals of speculation, under vLLM's names; they appear with the first proposal."""

    def __init__(self) -> None:
        # By the name of the total in `orca_jax.engine.totals`.
        self.totals = {
            "spec_decode_drafts": Counter(
                "spec_decode_num_drafts_total",
                "Proposals of speculation.",
                MODEL_LABELS,
                prefix=VLLM,
            ),
            "spec_decode_draft_tokens": Counter(
                "spec_decode_num_draft_tokens_total", "Proposed tokens.", MODEL_LABELS, prefix=VLLM
            ),
            "spec_decode_accepted_tokens": Counter(
                "spec_decode_num_accepted_tokens_total",
                "Accepted tokens.",
                MODEL_LABELS,
                prefix=VLLM,
            ),
        }
        self.accepted_per_pos = Counter(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted tokens by their place in the proposal, from 0.",
            (*MODEL_LABELS, "position"),
            prefix=VLLM,
        )

    def add_growth(self, grown: Mapping[str, float], model: str) -> None:
        """Add the growth of all totals, of the model of this name."""
        if not grown["spec_decode_drafts"]:
            return
        for name, counter in self.totals.items():
            counter.increase(grown[name], (model, ENGINE))
        for name, count in grown.items():
            if name.startswith(ACCEPTED_PER_POS):
                self.accepted_per_pos.increase(count, (model, ENGINE, name.rpartition("_")[2]))


class Metrics:
    """All metrics of a server: a collector for a registry of `prometheus_client`.

    Args:
        model: the served name, a label of the metrics with vLLM's names.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.requests = RequestSeries()
        self.engine = EngineSeries()
        self.http = HttpSeries()
        self.gateway = GatewaySeries()
        self.speculation = SpeculationSeries()

    def collect(self) -> Iterator[Metric]:
        """Yield the current samples; the registry calls this."""
        for instrument in self._instruments():
            yield instrument.family()
            for name, labels in TWINS.get(instrument.name, {}).items():
                of_engine = {"model_name": self._model, "engine": ENGINE, **labels}
                yield instrument.twin(VLLM + name, of_engine)

    def _instruments(self) -> Iterator[Instrument]:
        for group in (self.requests, self.engine, self.http, self.gateway, self.speculation):
            for value in vars(group).values():
                if isinstance(value, dict):
                    yield from value.values()
                else:
                    yield value
