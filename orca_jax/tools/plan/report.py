"""The report of a plan: a table for people, and values for JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.assembly.choices import PAGE_SIZE
from orca_jax.flags import program
from orca_jax.tools.plan.accelerators import GIB, Devices
from orca_jax.tools.plan.memory import Capacity
from orca_jax.tools.plan.options import Option
from orca_jax.values.cache_spec import LayerGroup

MEASURED = "measured kernels"
RATES = "peak rates"
COLUMNS = (
    *(
        "",
        "tensor",
        "stages",
        "copies",
        "weights",
        "workspace",
        "KV cache",
        "KV tokens",
        "rows",
        "length",
    ),
    *("ms/token", "tokens/s", "prompt ms"),
)


def print_plan(
    model: str,
    devices: Devices,
    found: Sequence[Option],
    chosen: Option | None,
    flags: Sequence[str],
) -> None:
    """Print all options, the chosen one with a star, and its command. `flags` are added to the command."""
    kind = devices.kind
    print(
        f"{model} on {devices.number} x {devices.name}, {kind.memory / GIB:.1f} GiB each ({kind.source})"
    )
    print(f"sizes are GiB on the fullest device; times are estimates from {_origin(found)}")
    rows = [COLUMNS, *(_row(option, option is chosen) for option in found if option.fits)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if len(rows) > 1 else []:
        print(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    # Of each width, the split with the most stages lacks least.
    lacking = {option.memory.split.tensor: option for option in found if not option.fits}
    for option in lacking.values():
        print(_shortage(option))
    if not found:
        print("no number of these devices divides the model evenly")
    if chosen is None:
        print(
            "the model does not fit: use more or larger devices, or lower --max-model-len or --max-num-seqs"
        )
        return
    split = chosen.memory.split
    if chosen.replicas > 1:
        size = "one device" if split.num_devices == 1 else f"{split.num_devices} devices"
        print(
            f"the model fits {size}: start {chosen.replicas} replicas, each with a server of its own"
        )
    print(" ".join([program("serve"), "--model", model, *flags, *chosen.flags()]))


def _origin(found: Sequence[Option]) -> str:
    """Return what the times are from, in words."""
    rates = f"{RATES}, not measurements"
    timed = [option.is_measured for option in found if option.times is not None]
    if not any(timed):
        return rates
    return MEASURED if all(timed) else f"{MEASURED}, or for some splits from {rates}"


def print_compiled(compiled: Mapping[str, int], chosen: Option) -> None:
    """Print the memory of the compiled programs beside the estimate."""
    needed = max(compiled["temporary"], compiled["sampler"])
    reserved = max(stage.workspace for stage in chosen.memory.stages)
    print(
        f"compiled: the arguments of the layers have {compiled['arguments'] / GIB:.2f} GiB on a device, and the "
        f"programs need {needed / GIB:.2f} GiB besides, of {reserved / GIB:.2f} GiB of workspace"
    )
    if needed > reserved:
        print(
            "warning: the programs need more than the workspace; lower --gpu-memory-utilization by the difference"
        )


def described(option: Option) -> dict[str, Any]:
    """Return the values of an option for JSON. Bytes are of each device of a stage."""
    memory = option.memory
    return {
        "tensor_parallel_size": memory.split.tensor,
        "pipeline_parallel_size": memory.split.stages,
        "replicas": option.replicas,
        "nnodes": option.nodes,
        "fits": option.fits,
        "shortage_bytes": memory.shortage,
        "max_num_seqs": memory.rows,
        "num_rows": memory.num_rows,
        "max_model_len": memory.max_model_len,
        "context": memory.context,
        "num_pages": memory.cache.num_blocks[0],
        "kv_cache_tokens": memory.cache_tokens,
        "kv_cache_groups": [_described_group(group, memory) for group in memory.cache.groups],
        "request_layer_tokens": memory.request_layer_tokens,
        "num_states": memory.cache.num_states,
        "stages": [
            {
                "layers": stage.span.size,
                "weights": stage.weights,
                "workspace": stage.workspace,
                "kv_cache": stage.cache,
            }
            for stage in memory.stages
        ],
        "times": _times(option),
        "flags": option.flags(),
    }


def _described_group(group: LayerGroup, memory: Capacity) -> dict[str, Any]:
    """Return the values of a group of layers, and the blocks of a request of `context` tokens that generates."""
    return {
        "layers": len(group.layers),
        "pages_per_block": group.pages_per_block,
        "window": group.window,
        "blocks_of_a_request": group.blocks_in_decode(memory.context, PAGE_SIZE),
    }


def _times(option: Option) -> dict[str, float | str] | None:
    """Return the expected times of a copy and the tokens of all copies; None if they are unknown."""
    if option.times is None:
        return None
    return {
        **option.times._asdict(),
        "from": MEASURED if option.is_measured else RATES,
        "tokens_per_second_of_all": option.tokens_per_second,
    }


def _row(option: Option, is_chosen: bool) -> tuple[str, ...]:
    memory = option.memory
    times = option.times
    fullest = max(memory.stages, key=lambda stage: stage.weights + stage.cache)
    sizes = (f"{size / GIB:.1f}" for size in (fullest.weights, fullest.workspace, fullest.cache))
    speeds = (
        ("?", "?", "?")
        if times is None
        else (
            f"{1e3 * times.token_seconds:.1f}",
            f"{option.tokens_per_second:,.0f}",
            f"{1e3 * times.prompt_seconds:.0f}",
        )
    )
    counts = (f"{memory.cache_tokens:,}", str(memory.rows), f"{memory.max_model_len:,}")
    split = (str(memory.split.tensor), str(memory.split.stages), str(option.replicas))
    return ("*" if is_chosen else "", *split, *sizes, *counts, *speeds)


def _shortage(option: Option) -> str:
    memory = option.memory
    stages = f"{memory.split.stages} stages or fewer" if memory.split.stages > 1 else "1 stage"
    return (
        f"tensor {memory.split.tensor}, {stages}: does not fit; a device lacks {memory.shortage / GIB:.1f} GiB for a "
        f"request of {memory.max_model_len:,} tokens beside {memory.num_rows} row{'s' * (memory.num_rows > 1)}"
    )
