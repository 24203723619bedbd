"""One burst on a GPT-2 in real time under every policy, with equal tokens."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.shelf.table import PATIENCE, POLICIES, READING, RESULT, latencies, on_time, row_of
from lab.shelf.virtual import Service
from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.helpers.processor import cpu_name
from orca_jax.tools.bench.burst import mixed_burst
from orca_jax.tools.bench.measure import reschedule, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

BURST = RESULT.with_name("burst.json")
MODEL = "preset:gpt2"
TOKENS = 1024
"""Most tokens of all prompts and answers together."""
BATCH, ROWS = 4, 8
PASSES = 3
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "k_lpm": {"k": 16},
    "srpt_noisy": {"noise": 0.5},
    "pools": {"places": BATCH, "bounds": [16, 32]},
}
COLUMNS = {
    "tokens_per_s": "tokens/s", "p50_ttft_ms": "TTFT, ms: p50", "p99_ttft_ms": "p99", "p50_gap_ms": "gap, ms: p50",
    "p99_gap_ms": "p99", "p50_normalized_ms": "ms/token: p50", "p99_normalized_ms": "p99", "qoe": "QoE",
    "evictions": "preemptions",
}  # fmt: skip


def served(built: Built, burst: list[WorkloadRequest]) -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of a burst, and its figures."""
    engine = built.engine
    start = time.monotonic()
    before = engine.stats.preemptions
    tokens: list[list[int]] = [[] for _ in burst]
    services = [Service(start, []) for _ in burst]
    for index, request in enumerate(burst):
        params = SamplingParams(request.num_output, temperature=0.0, ignore_eos=True)
        engine.add_request(str(index), request.prompt_ids, params)
    while engine.has_work:
        updates = engine.step()
        now = time.monotonic()
        for update in updates:
            index = int(update.request_id)
            tokens[index] += update.new_ids
            services[index].tokens.extend([now] * len(update.new_ids))
    found = {"tokens_per_s": sum(map(len, tokens)) / (max([each.end for each in services]) - start)}
    found |= latencies(services) | {"qoe": statistics.fmean(map(on_time, services))}
    return tokens, found | {"evictions": engine.stats.preemptions - before}


def measured(policies: Sequence[str] = tuple(POLICIES), model: str = MODEL) -> dict[str, Any]:
    """The figures of policies, `PASSES` of each in turn; equal tokens are asserted."""
    burst = mixed_burst(16, prompt_tokens=(8, 48), output_tokens=(8, 56))
    num_tokens = sum([len(request.prompt_ids) + request.num_output for request in burst])
    assert num_tokens <= TOKENS, f"{num_tokens} tokens"
    config = EngineConfig(
        model=model, load_format="dummy", dtype="float32", max_model_len=128, max_num_seqs=BATCH, max_num_rows=ROWS,
        max_num_batched_tokens=64, page_size=16, num_pages=256, enable_prefix_caching=True,
        scheduler=_class_of("sarathi"),
    )  # fmt: skip
    expected = list[list[int]]()
    figures = dict[str, dict[str, list[float]]]()
    with build_engine(config) as built:
        warm_up(built.engine, burst)
        for _ in range(PASSES):
            for name in policies:
                options = json.dumps(OPTIONS.get(name, {}))
                predictor = "quantiles" if name == "srpt_quantiles" else None
                own = replace(
                    config,
                    scheduler=_class_of(name),
                    scheduler_options=options,
                    length_predictor=predictor,
                )
                reschedule(built, own)
                tokens, found = served(built, burst)
                expected = expected or tokens
                assert tokens == expected, f"{name} has other tokens"
                for key, value in found.items():
                    figures.setdefault(name, {}).setdefault(key, []).append(value)
    return {
        "model": model,
        "requests": len(burst),
        "tokens": num_tokens,
        "cpu": cpu_name(),
        "policies": figures,
    }


def block(path: Path = BURST) -> str:
    """The section of the page."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [row_of(name, each, COLUMNS) for name, each in found["policies"].items()]
    return (
        "## A burst in real time\n\n"
        f"`python -m lab shelf --burst` serves {found['requests']} requests at once, with {found['tokens']:,} tokens "
        f"of prompts and answers, on a GPT-2 with the sizes of the published one and random weights, in float32 on "
        f"the CPU ({found['cpu']}): {BATCH} requests in an iteration, {ROWS} with rows. The tokens of all policies "
        f"are equal; the command ends with an error otherwise. A value is the mean of {PASSES} passes, and ± half of "
        f"their range. A reader expects the first token after {PATIENCE:g} s, and then {READING:g} in each second.\n\n"
        + wide_table(["", *COLUMNS.values()], rows)
    )


def _class_of(name: str) -> str:
    if name not in POLICIES:
        return name
    kind = type(POLICIES[name]())
    return f"{kind.__module__}:{kind.__qualname__}"
