"""Compares settings of the engine: an engine for each of them in one process, which take turns.

    python -m lab.measured.settings [--model preset:gpt2] [--repeats 7] '{"cpu_products": "xla"}' '{}'

Each setting is a JSON object with arguments of `orca_jax.LLM`. Separate processes differ by more than 5 % for other
reasons, so smaller effects need engines that take turns. The script prints the median seconds of each setting and load,
the median ratio of the first setting to each of them, and whether all tokens are equal. The last line is JSON.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from orca_jax import LLM, SamplingParams
from orca_jax.helpers.processor import cpu_name
from orca_jax.model.describe import read_model_config
from orca_jax.values.errors import OrcaError

type Load = tuple[list[list[int]], list[int]]
"""Prompts and the number of tokens of each answer."""


def make_loads(vocabulary: int, seed: int = 0) -> dict[str, Load]:
    """Prompts alone, increments of 1, 8 and 32 requests, and a mixture."""
    draw = np.random.default_rng(seed)

    def load(lengths: Iterable[int], answers: Iterable[int]) -> Load:
        return [draw.integers(1, vocabulary, length).tolist() for length in lengths], [
            int(each) for each in answers
        ]

    loads = {"prompts": load([512] * 8, [1] * 8)}
    loads |= {f"{rows} increments": load([100] * rows, [64] * rows) for rows in (1, 8, 32)}
    return {**loads, "mixture": load(draw.integers(32, 512, 24), draw.integers(8, 128, 24))}


def run(llm: LLM, load: Load) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and tokens of one pass."""
    prompts, answers = load
    params = [SamplingParams(max_tokens=each, temperature=0.0, ignore_eos=True) for each in answers]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [tuple(output.outputs[0].token_ids) for output in outputs]


def compare(engines: Sequence[LLM], load: Load, repeats: int) -> dict[str, Any]:
    """The median seconds of each engine, the ratios of the first one to them, and whether all tokens are equal."""
    seconds = np.empty((repeats, len(engines)))
    tokens = []
    for repeat in range(-1, repeats):  # the first pass is not counted
        for index, llm in enumerate(engines):
            taken, found = run(llm, load)
            tokens.append(found)
            if repeat >= 0:
                seconds[repeat, index] = taken
    return {
        "seconds": np.median(seconds, axis=0).round(3).tolist(),
        "ratios": np.median(seconds[:, :1] / seconds, axis=0).round(3).tolist(),
        "same_tokens": all(each == tokens[0] for each in tokens),
    }


def setting(text: str) -> dict[str, Any]:
    """The arguments of an engine from JSON."""
    found = None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f'{text} is not a JSON object, such as \'{{"cpu_products": "xla"}}\''
        )
    return found


def main() -> None:
    """Compare all settings under all loads."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", type=setting, nargs="+", metavar="JSON")
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    common = {
        "dtype": options.dtype,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "progress": False,
    }
    try:
        engines = [
            LLM(options.model, **{**common, "enable_prefix_caching": False, **each})
            for each in options.settings
        ]
    except OrcaError as error:
        sys.exit(f"compare_settings: {error}")
    found = {}
    for name, load in make_loads(read_model_config(options.model).vocab_size).items():
        found[name] = compare(engines, load, options.repeats)
        print(
            f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()),
            flush=True,
        )
    print(json.dumps({**vars(options), "cpu": cpu_name(), "loads": found}))


if __name__ == "__main__":
    main()
