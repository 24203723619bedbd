"""Measure the loading of safetensors into the memory of devices, against a plain read of the same files.

The files are read once before, so that they come from the page cache if they fit into it. The plain read is a loop over
all bytes with one buffer of 16 MiB, in one thread: it keeps nothing. Another read puts each file into new memory.
Loading keeps all weights, in the form in which an engine has them, on one device. It runs twice: the first time, memory
may still have to come from the host of a virtual machine. Peak memory is that of the first time, with Python and JAX.
"""

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

from orca_jax.bundled import model_directory
from orca_jax.config import DType
from orca_jax.errors import ConfigError
from orca_jax.reporting import hardware, print_table

BUFFER_BYTES = 16 * 2**20


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", required=True, metavar="DIR", help="directory with safetensors, or ORG/NAME")
    parser.add_argument(
        "--dtype", choices=get_args(DType), default="bfloat16", help="type of the loaded weights (default: bfloat16)"
    )
    parser.add_argument(
        "--random", metavar="preset:NAME", help="first write DIR with random bfloat16 weights of this preset's shape"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of these weights (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Measure, and print a table and a line of JSON.

    Raises:
        ConfigError: a flag or the model is wrong.
    """
    if args.random is not None:
        from lab.loading.random_model import write_random_model  # help comes without NumPy

        write_random_model(args.random, Path(args.model), args.seed)
    directory = Path(model_directory(args.model))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} has no safetensors", param="model")
    size = sum(file.stat().st_size for file in files)
    read_files(files)
    plain = read_files(files)
    first = measure_load(directory, args.dtype)  # of a virtual machine: memory comes from its host
    new_memory = statistics.median(read_into_new_memory(files) for _ in range(3))
    result = {
        "file_bytes": size,
        "page_cache_gb_per_s": size / plain / 1e9,
        "new_memory_gb_per_s": size / new_memory / 1e9,
        **first,
        "first_load_s": first["load_s"],
        "load_s": measure_load(directory, args.dtype)["load_s"],
    }
    result["gb_per_s"] = size / result["load_s"] / 1e9
    result["ratio"] = result["gb_per_s"] / result["page_cache_gb_per_s"]
    result["ratio_to_new_memory"] = result["gb_per_s"] / result["new_memory_gb_per_s"]
    print_table(f"{args.model} as {args.dtype}", result)
    config = {name: getattr(args, name) for name in ("model", "dtype", "random", "seed")}
    print(json.dumps({**result, "hardware": hardware(), "config": config}))


def read_files(files: list[Path]) -> float:
    """Read all bytes of the files; return the seconds."""
    buffer = bytearray(BUFFER_BYTES)
    begun = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begun


def read_into_new_memory(files: list[Path]) -> float:
    """Read each file into memory that the process did not have before, as a loader must; return the seconds.

    The memory of a file is freed before the next one is read, so that a model may fill most of the memory.
    """
    import numpy as np  # help comes without it

    seconds = 0.0
    for file in files:
        begun = time.perf_counter()
        held = np.fromfile(file, np.uint8)
        seconds += time.perf_counter() - begun
        del held
    return seconds


def measure_load(directory: Path, dtype: DType) -> dict[str, float]:
    """Load the weights onto the first device; return seconds and bytes.

    Returns:
        `load_s` and `load_cpu_s`, `weight_bytes`, `start_rss_bytes` before, and `peak_rss_bytes` of the process; with
        weights in the memory of the host, `extra_bytes` is the peak without both.
    """
    import jax
    from flax import nnx

    from orca_jax.assembly.executor import arrange
    from orca_jax.exec.memory import limit_threads
    from orca_jax.model.load import prepare_load, tensor_mesh

    limit_threads()
    gc.collect()  # an earlier decoder holds itself
    device = jax.devices()[0]
    before = peak_bytes()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    loading = prepare_load(directory, dtype=dtype, load_format="safetensors")
    decoder = loading.load(tensor_mesh([device]), arrange=lambda made: arrange(device.platform, made))
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(decoder)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    size = sum(leaf.nbytes for leaf in leaves)
    peak = peak_bytes()
    on_host = size if device.platform == "cpu" else 0
    return {
        "load_s": seconds,
        "load_cpu_s": cpu,
        "weight_bytes": size,
        "start_rss_bytes": before,
        "peak_rss_bytes": peak,
        "extra_bytes": peak - before - on_host,
    }


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
