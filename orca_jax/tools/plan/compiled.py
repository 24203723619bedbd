"""The memory of compiled programs for TPUs that are not there: libtpu has the compilers of all generations.

`python -m orca_jax plan --compile` runs this module in its own process, since libtpu takes settings from the
environment only: `python -m orca_jax.tools.plan.compiled JSON` prints a JSON object.
"""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from orca_jax.assembly.choices import PAGE_SIZE, Budget
from orca_jax.flags.needs import check_needs
from orca_jax.model.describe import read_model_config
from orca_jax.model.stages import LayerSpan
from orca_jax.tools.plan.accelerators import Devices
from orca_jax.tools.plan.memory import Capacity, Demand
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig
from orca_jax.values.errors import OrcaError

# Without these, libtpu looks for a TPU VM, and locks the TPU against a second process.
_VARIABLES = (
    *(
        "JAX_PLATFORMS=cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        "TPU_LOG_DIR=disabled",
        "TPU_SKIP_MDS_QUERY=1",
    ),
    *("TPU_ACCELERATOR_TYPE=v5litepod-4", "TPU_WORKER_HOSTNAMES=localhost", "TPU_WORKER_ID=0"),
    *("TPU_STDERR_LOG_LEVEL=3", "TPU_MIN_LOG_LEVEL=3"),
)
_TOPOLOGIES = {  # of each generation, the smallest first, with the number of JAX's devices
    "v5e": {"2x2": 4, "2x4": 8, "4x4": 16, "4x8": 32, "8x8": 64},
    "v6e": {"2x2": 4, "2x4": 8, "4x4": 16, "4x8": 32, "8x8": 64},
    "v5p": {"2x2x1": 4, "2x2x2": 8, "2x2x4": 16, "2x4x4": 32, "4x4x4": 64},
    "tpu7x": {"2x2x1": 8, "2x2x2": 16, "2x2x4": 32, "2x4x4": 64},
}


def topology_of(devices: Devices, tensor: int) -> str:
    """Return the smallest topology with this many devices of a generation of TPUs.

    Raises:
        ConfigError: the devices are not TPUs, or there are more of them than in the largest topology.
    """
    sizes = _TOPOLOGIES.get(devices.name, {})
    names = ", ".join(_TOPOLOGIES)
    most = max(sizes.values(), default=0)
    check_needs(
        "plan",
        SimpleNamespace(devices=devices.name, known=names, most=most, tensor=tensor),
        ("compile",),
    )
    shape = next(shape for shape, number in sizes.items() if number >= tensor)
    return f"{devices.name}:{shape}"


def compiled_memory(
    model: str, devices: Devices, capacity: Capacity, demand: Demand
) -> dict[str, int]:
    """Compile the programs of the fullest stage; return bytes on one device.

    Returns:
        `arguments`, with weights and KV cache, and `temporary` of the layers, and `sampler`, the temporary ones of a
        greedy sampler as wide as all rows; 0 if the stage has no sampler.

    Raises:
        ConfigError: the devices are not TPUs.
        OrcaError: libtpu is missing, or the compilation failed.
    """
    job = {
        "model": model,
        "topology": topology_of(devices, capacity.split.tensor),
        "tensor": capacity.split.tensor,
        "span": max(capacity.stages, key=lambda stage: stage.weights + stage.cache).span,
        "stages": capacity.split.stages,
        "max_num_seqs": capacity.rows,
        "num_rows": capacity.num_rows,
        "max_model_len": capacity.max_model_len,
        "num_blocks": capacity.cache.num_blocks,
        "num_states": capacity.cache.num_states,
        "dtype": demand.dtype,
        "quantization": demand.quantization,
        "kv_cache_dtype": demand.kv_cache_dtype,
    }
    command = [
        "env",
        *_VARIABLES,
        sys.executable,
        "-m",
        "orca_jax.tools.plan.compiled",
        json.dumps(job),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise OrcaError(
            f"the programs cannot be compiled: {last}; to install the compiler: pip install libtpu"
        )
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_programs(job: dict[str, Any]) -> dict[str, int]:
    """Compile for the topology of `job`; returns the values of `compiled_memory`."""
    from jax.experimental import topologies

    from orca_jax.exec.programs import Programs
    from orca_jax.model.load import Loading, tensor_mesh
    from orca_jax.model.sharding import on_shards
    from orca_jax.values.startup import StartTimes

    topology = topologies.get_topology_desc(topology_name=job["topology"], platform="tpu")
    mesh = tensor_mesh(list(topology.devices[: job["tensor"]]))
    model = read_model_config(job["model"])
    model = replace(model, quantization=job["quantization"] or model.quantization)
    tokens = Budget(None, job["max_num_seqs"]).largest("tpu")
    groups = form_groups(
        on_shards(model, job["tensor"]).layer_caches, job["max_model_len"], views=False
    )
    blocks = tuple(job["num_blocks"])
    states = job["num_states"]
    cache = CacheConfig(groups, blocks, PAGE_SIZE, job["kv_cache_dtype"], "token_major", states)
    config = ExecutorConfig(
        dtype=job["dtype"],
        tensor_parallel_size=job["tensor"],
        buckets=(tokens,),
        num_rows=job["num_rows"],
        max_model_len=job["max_model_len"],
        cache=cache,
        pipeline_parallel_size=job["stages"],
    )
    shapes = Loading(model, job["dtype"], None, 0).shapes(mesh, LayerSpan(*job["span"]))
    programs = Programs(shapes, config, mesh, greedy_only=True)
    memory: dict[str, Any] = {}
    for (name, _), program in programs.compile(lambda *_: None, StartTimes()).items():
        memory[name] = program.memory_analysis()
        assert memory[name] is not None, "libtpu reports the memory of programs"
    return {
        "arguments": memory["layers"].argument_size_in_bytes,
        "temporary": memory["layers"].temp_size_in_bytes,
        "sampler": memory["greedy"].temp_size_in_bytes if programs.is_last else 0,
    }


if __name__ == "__main__":
    print(json.dumps(compile_programs(json.loads(sys.argv[1]))))
