"""Throughput of a pipeline on the real engine over the iterations in flight: Algorithm 1's `n_workers`.

All requests are there from the start and have equal lengths. The numbers of iterations in flight take turns in each
pass. On a CPU each stage has a device of its own, with one thread for its products; more stages than cores share them.
The exit status is 1 if the tokens differ, or if two stages on two cores gain less than `LEAST_GAIN`.
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.real.opening import surroundings
from lab.real.page import machine_of
from lab.real.quiet import Quiet
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import rounded, write_file
from orca_jax.tools.bench.measure import reschedule, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

RESULT = Path(__file__).parent / "results" / "workers.json"
LEAST_GAIN = 1.2
"""Of two iterations in flight over one, with two stages on two cores or more."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--model", default="preset:gpt2", metavar="MODEL", help="default: preset:gpt2"
    )
    add_number(parser, "--stages", [2, 4], "pipelines", nargs="+")
    add_number(parser, "--max-bs", 8, "requests of an iteration")
    add_number(parser, "--num-requests", 48, "requests of a pass")
    add_number(parser, "--tokens", [64, 16], "of each", nargs=2)
    add_number(parser, "--passes", 3, "the median counts")
    parser.add_argument("--record", action="store_true", help="write the result into lab/results")


def run(args: argparse.Namespace) -> int:
    """Measure; print a line for each number of iterations in flight, and JSON."""
    config = EngineConfig(args.model, scheduler="orca", max_num_seqs=args.max_bs, max_model_len=sum(args.tokens),
                          progress=False)  # fmt: skip
    found = surroundings(config) | {
        "tokens": args.tokens,
        "num_requests": args.num_requests,
        "passes": args.passes,
    }
    found["pipelines"] = {str(stages): _apart(config, stages, args) for stages in args.stages}
    found["verdict"] = verdict(found)
    if args.record:
        write_file(RESULT, (json.dumps(rounded(found), indent=1) + "\n").encode())
    print(json.dumps(rounded(found)))
    return int(found["verdict"] == "FAIL")


def _apart(config: EngineConfig, stages: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure each pipeline in a process with a device for each of its stages: more devices would have more threads."""
    if len(args.stages) == 1:
        return measure(config, stages, args)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, config, stages, args).result()


def measure(config: EngineConfig, stages: int, args: argparse.Namespace) -> dict[str, Any]:
    """The rates of a pipeline, by iterations in flight up to one more than its stages."""
    import jax

    with contextlib.suppress(RuntimeError):  # the devices are open already, as in tests
        jax.config.update("jax_num_cpu_devices", stages)
    numbers = list(range(1, stages + 2))
    largest = replace(config, pipeline_parallel_size=stages, n_workers=numbers[-1])
    num_prompt, num_output = args.tokens
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    machine: list[dict[str, Any]] = []
    tokens = []
    quiet = Quiet()
    with build_engine(largest) as built:
        dice = random.Random(0)
        prompts = [
            dice.choices(range(built.model_config.vocab_size), k=num_prompt)
            for _ in range(args.num_requests)
        ]
        warm_up(built.engine, [WorkloadRequest(0.0, tuple(each), num_output) for each in prompts])
        for _ in range(args.passes):
            for number in numbers:
                reschedule(built, replace(largest, n_workers=number))
                (seconds, ids), about = quiet.run_quietly(
                    lambda: serve(built.engine, prompts, num_output)
                )
                rates[number].append(len(prompts) * num_output / seconds)
                machine.append({"n_workers": number, **about})
                tokens.append(ids)
            numbers.reverse()
    median = {str(number): statistics.median(each) for number, each in rates.items()}
    for name, rate in median.items():
        print(
            f"{stages} stages, n_workers {name}: {rate:.1f} tokens/s, {rate / median['1']:.2f} times one",
            flush=True,
        )
    gain = {name: rate / median["1"] for name, rate in median.items()}
    equal = all(each == tokens[0] for each in tokens)
    return {
        "tokens_per_s": median,
        "gain": gain,
        "equal_tokens": equal,
        "all_passes": rates,
        "runs": machine,
    }


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], num_output: int
) -> tuple[float, dict[str, list[int]]]:
    """Serve all prompts at once; return the seconds and the ids of each request."""
    start = time.perf_counter()
    ids: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(
            str(index), prompt, SamplingParams(num_output, temperature=0.0, ignore_eos=True)
        )
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            ids.setdefault(update.request_id, []).extend(update.new_ids)
    return time.perf_counter() - start, ids


def verdict(found: dict[str, Any]) -> str:
    """PASS, FAIL, or a dash if the machine cannot show the gain."""
    pipelines = found["pipelines"]
    if not all(each["equal_tokens"] for each in pipelines.values()):
        return "FAIL"
    if "2" not in pipelines or (found["hardware"]["cores"] or 1) < 2:
        return "-"
    return "PASS" if pipelines["2"]["gain"]["2"] >= LEAST_GAIN else "FAIL"


def block() -> str:
    """The table of the recorded result, in Markdown."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    cores = found["hardware"]["cores"]
    rows = []
    for stages, each in found["pipelines"].items():
        place = f"{stages} on {cores} cores" + (", oversubscribed" if int(stages) > cores else "")
        same = "equal" if each["equal_tokens"] else "DIFFERENT"
        rows += [
            [place, number, f"{rate:.1f}", f"{each['gain'][number]:.2f}", same]
            for number, rate in each["tokens_per_s"].items()
        ]
    head = ["stages", "iterations in flight", "tokens/s", "times one in flight", "tokens"]
    runs = list(chain.from_iterable(each["runs"] for each in found["pipelines"].values()))
    num_prompt, num_output = found["tokens"]
    return (
        f"{wide_table(head, rows)}\n{machine_of(found, runs)}. {found['num_requests']} requests of "
        f"{num_prompt} and {num_output} tokens, {found['config']['max_num_seqs']} in an iteration; the median of "
        f"{found['passes']} passes. Two in flight on two stages: **{found['verdict']}**."
    )
