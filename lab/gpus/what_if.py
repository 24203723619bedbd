"""`python -m lab what_if`: the years since the paper, one change after another, from measured kernels.

The first engine serves batches by request on the paper's cards. Each further step changes one thing. All requests of a
load are there from the start, and the throughput is that of its middle. The pauses are those of Poisson arrivals at a
share of this throughput.

The engine of the paper's year has the kernels of `lab/paper/kernels.py`. Slots are reserved for a prompt and the
longest answer of the load; batches by request have places of the longest request. Pages are of 16 tokens.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lab.pages.markdown import table, write_between
from lab.paper.kernels import KernelCost, KernelSource, cost_with
from lab.paper.runs import paper_lengths, poisson
from lab.paper.sweep import middle_rate
from orca_jax.helpers.reporting import (
    new_figure,
    rounded,
    save_plot,
    use_plain_numbers,
    write_file,
)
from orca_jax.timeline.measure import token_times
from orca_jax.tools.bench.virtual import SimulatedRequest
from orca_jax.tools.bench.workload.files import read_azure, read_mooncake
from orca_jax.tools.plan.accelerators import ACCELERATORS
from orca_jax.tools.plan.tables import CARDS
from orca_jax.tools.simulate.run import SimulatedRun, simulate
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.errors import ConfigError

PAGE = Path("docs/real_gpus.md")
PICTURE = Path("docs/what_if.svg")
RESULT = Path(__file__).parents[1] / "results" / "what-if-years.json"
BEGIN = "<!-- begin: python -m lab what_if --data DIR --traces DIR --write -->\n"
END = "<!-- end of what if -->"
USABLE = 0.9
ROWS = 256
"""Requests of a batch, if they fit."""
BUDGET = 2048
STAGES = 2  # the most of a load
SHARE = 0.8  # of the throughput
EVERY = 5
"""Batches by request serve one request in so many, as each takes an iteration for each token of its longest prompt."""
UNLIMITED = 1_000_000
PAGE_SIZE = 16

type Memory = Callable[["Load", int], Mapping[str, Any]]
"""Settings of an engine for a load and a number of slots."""


class Load(NamedTuple):
    """Requests of a model.

    Attributes:
        name: of the table.
        model: its flag.
        tensor: devices of a stage.
        stages: of the pipeline.
        lengths: prompt and generated tokens.
    """

    name: str
    model: str
    tensor: int
    stages: int
    lengths: list[tuple[int, int]]

    @property
    def longest_answer(self) -> int:
        """The most generated tokens."""
        return max([generated for _, generated in self.lengths])

    @property
    def longest(self) -> int:
        """The most tokens of a request, with the longest answer."""
        return max([prompt for prompt, _ in self.lengths]) + self.longest_answer


class Step(NamedTuple):
    """An engine that differs from the one before it in one thing.

    Attributes:
        cause: scheduling, memory, kernels or card.
        name: of the table.
        policy: the scheduler.
        settings: of the engine.
        card: as `plan` names it.
        source: the kernels, by those of the paper's year.
    """

    cause: str
    name: str
    policy: str
    settings: Memory
    card: str
    source: Callable[[KernelSource], KernelSource]


class StepResult(NamedTuple):
    """Requests per second, the median request's longest pause between two tokens, and lookups outside of tables."""

    requests_per_s: float
    pause_s: float
    num_outside: int


def by_request(load: Load, num_slots: int) -> Mapping[str, Any]:
    """Places for the longest requests."""
    return _reserved(max(1, min(ROWS, num_slots // load.longest)), num_slots)


def with_slots(load: Load, num_slots: int) -> Mapping[str, Any]:
    """Slots for the prompt and the longest answer of each request."""
    return _reserved(ROWS, num_slots)


def _reserved(rows: int, num_slots: int) -> Mapping[str, Any]:
    """Slots for some rows, without loss by pages."""
    num_pages = num_slots // PAGE_SIZE + STAGES * rows
    return {"max_num_seqs": rows, "n_slots": num_slots, "num_pages": num_pages}


def with_pages(load: Load, num_slots: int) -> Mapping[str, Any]:
    """Pages on demand, and whole prompts in one iteration."""
    number = num_slots // PAGE_SIZE
    budget = {"max_num_batched_tokens": UNLIMITED}
    return {"max_num_seqs": ROWS, "num_pages": number, "page_size": PAGE_SIZE, **budget}


def in_chunks(load: Load, num_slots: int) -> Mapping[str, Any]:
    """Pages on demand, and at most `BUDGET` tokens in an iteration."""
    return {**with_pages(load, num_slots), "max_num_batched_tokens": BUDGET}


def same(source: KernelSource) -> KernelSource:
    """The kernels of the paper's year."""
    return source


def todays(source: KernelSource) -> KernelSource:
    """Kernels of today's vLLM on the paper's card."""
    return source._replace(attention="fused", writes=0, sums="own")


def on(card: str) -> Callable[[KernelSource], KernelSource]:
    """Kernels of today's vLLM on another card, as measured."""
    (name,) = [each for each, known in CARDS.items() if known == card]
    return lambda source: todays(source)._replace(card=name, bandwidth=0.0, tile=1)


STEPS = (
    Step(
        "",
        "batches by request, places for the longest",
        "request_level",
        by_request,
        "a100-40",
        same,
    ),
    Step("scheduling", "iterations (ORCA), slots", "orca", with_slots, "a100-40", same),
    Step("memory", "pages on demand", "chunked", with_pages, "a100-40", same),
    Step("scheduling", "prompts in chunks (`chunked`)", "chunked", in_chunks, "a100-40", same),
    Step("kernels", "kernels and sums of vLLM 0.14", "chunked", in_chunks, "a100-40", todays),
    Step("card", "H100, vLLM 0.19", "chunked", in_chunks, "h100", on("h100")),
    Step("card", "H200", "chunked", in_chunks, "h200", on("h200")),
)
CAUSES = ("scheduling", "memory", "kernels", "card")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of the tables of kernels"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of AzureLLMInferenceTrace_conv.csv and mooncake_conversation_trace.jsonl",
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")


def run(args: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        ConfigError: a table or a trace is missing or wrong.
    """
    loads = read_loads(args.traces)
    found: dict[str, list[dict[str, Any]]] = {}
    for load in loads:
        results = found.setdefault(load.name, [])
        for step in STEPS:
            each = result(step, load, KernelSource(args.data))
            print(f"{load.name}: {step.name}: {each}", flush=True)
            results.append(each._asdict())
    line = rounded(found)
    if args.write:
        write_file(RESULT, (json.dumps(line, indent=1) + "\n").encode())
        write_between(PAGE, BEGIN, END, block())
        draw(line)
    return 0


def read_loads(folder: Path) -> list[Load]:
    """The paper's load with its model, and the traces with a model of today. Raises ConfigError."""
    paper = [(each.num_prompt, each.num_generated) for each in paper_lengths(1000, 0)]
    loads = [Load("paper, GPT 175B on 16", "preset:gpt3-175b", 8, 2, paper)]
    for name, file, read, number in (
        ("Azure, Llama 70B on 8", "AzureLLMInferenceTrace_conv.csv", read_azure, 1000),
        ("Mooncake, Llama 70B on 8", "mooncake_conversation_trace.jsonl", read_mooncake, 300),
    ):
        recorded = read(str(folder / file), number, 1.0)
        lengths = [(each.num_input, each.num_output) for each in recorded]
        loads.append(Load(name, "preset:llama-3-70b", 8, 1, lengths))
    return loads


def result(step: Step, load: Load, source: KernelSource) -> StepResult:
    """Serve a load with an engine, all requests at once. Raises ConfigError: a table is missing or wrong."""
    cost = cost_with(load.model, load.tensor, step.source(source))
    num_slots = slots(cost, load.stages, ACCELERATORS[step.card].memory)
    if num_slots < load.longest:
        raise ConfigError(f"{load.name} does not fit {step.card}", param="data")
    settings = {"pipeline_parallel_size": load.stages, **step.settings(load, num_slots)}
    limit = load.longest_answer if "n_slots" in settings else None

    is_by_request = step.settings is by_request
    chosen = load.lengths[:: EVERY if is_by_request else 1]
    number = len(chosen)

    def served(arrivals: Sequence[float]) -> SimulatedRun:
        requests = [
            SimulatedRequest(at, *lengths, limit)
            for at, lengths in zip(arrivals, chosen, strict=True)
        ]
        return simulate(step.policy, requests, cost, **settings)

    before = cost.inner.num_outside  # the tables of two steps may be the same
    records = served([0.0] * number).records
    rate = middle_rate([record.end for record in records if record.end is not None])
    num_outside = cost.inner.num_outside - before
    if is_by_request:  # it sends all tokens at the end
        return StepResult(rate, 0.0, num_outside)
    pause = median_pause(served(poisson(SHARE * rate, number, 0)))
    return StepResult(rate, pause, num_outside)


def median_pause(run: SimulatedRun) -> float:
    """The median over requests of their longest seconds between two tokens."""
    pauses = []
    for times in token_times(run.timeline).values():
        if len(times) > 1:
            pauses.append(max([after - before for before, after in pairwise(times)]))
    return median(pauses)


def slots(cost: KernelCost, stages: int, memory: float) -> int:
    """Tokens whose keys and values fit beside the weights of the first stage."""
    model = cost.inner.model
    layers = ceil_div(model.num_layers, stages)
    weights = layers * sum([each.outputs * each.inputs for each in cost.inner.products])
    weights += cost.inner.unembedding.outputs * cost.inner.unembedding.inputs
    tensor = cost.inner.settings.tensor
    heads = max(1, model.num_kv_heads // tensor)
    slot = 2 * heads * model.head_dim * layers
    return int((USABLE * memory - 2 * weights) / (2 * slot))


def block() -> str:
    """The recorded steps, in Markdown."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    head = ["change", "engine"]
    for name in found:
        head += [f"{name}: requests/s", "times", "longest pause, s"]
    rows = []
    for place, step in enumerate(STEPS):
        cells = [step.cause, step.name]
        for results in found.values():
            each = results[place]
            factor = ""
            if place:
                factor = f"{each['requests_per_s'] / results[place - 1]['requests_per_s']:.2f}"
            pause = f"{each['pause_s']:.3g}" if place else ""
            cells += [f"{each['requests_per_s']:.3g}", factor, pause]
        rows.append(cells)
    text = table(head, rows) + "\n" + table(["times", *CAUSES, "all"], causes(found))
    outside = ", ".join([f"{_num_outside(steps):,}" for steps in found.values()])
    return (
        f"{text}\n![Requests per second of each engine]({PICTURE.name})\n\n"
        f"The steps are in this order: another order has other factors. Lookups outside of the "
        f"tables: {outside}. Those of Mooncake's long prompts under the paper's kernels are "
        "extrapolated by far. Prefixes are not shared. Batches by request serve one request in "
        f"{EVERY}. A batch has at most {ROWS} requests, and a card counts with its memory. The "
        "longest pause between two tokens is that of the median request, with Poisson arrivals at "
        f"{SHARE:.0%} of the throughput.\n"
    )


def _num_outside(results: Sequence[Mapping[str, Any]]) -> int:
    return sum([each["num_outside"] for each in results])


def causes(found: Mapping[str, Any]) -> list[list[str]]:
    """The product of the factors of each cause, by load."""
    rows = []
    for name, results in found.items():
        factors = dict.fromkeys(CAUSES, 1.0)
        rates = [each["requests_per_s"] for each in results]
        for step, (before, after) in zip(STEPS[1:], pairwise(rates), strict=True):
            factors[step.cause] *= after / before
        values = [*factors.values(), rates[-1] / rates[0]]
        rows.append([name, *[f"{value:.2f}" for value in values]])
    return rows


def draw(found: Mapping[str, Any]) -> None:
    """Draw the requests per second of each engine."""
    figure = new_figure(7.2, 3.8)
    axes = figure.subplots()
    names = [step.name.replace("`", "") for step in STEPS]
    for name, results in found.items():
        rates = [each["requests_per_s"] for each in results]
        axes.plot(rates, range(len(rates)), marker="o", label=name)
    axes.set(xscale="log", xlabel="requests/s, all at once", yticks=range(len(names)))
    axes.set_yticklabels(names)
    axes.invert_yaxis()
    axes.grid(visible=True, which="both", alpha=0.25)
    use_plain_numbers(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3)
    save_plot(figure, str(PICTURE))
