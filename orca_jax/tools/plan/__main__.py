"""`python -m orca_jax plan --model M --devices D`: memory and expected times of a model, before a device is touched.

    python -m orca_jax plan --model preset:gpt3-175b --devices a100-40x16

prints a table of all sensible ways to split the model over the devices: tensor parallelism within a layer, pipeline
stages, and copies of the model. Then it prints the flags of the best one. A model directory needs its config.json only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from orca_jax.flags import (
    FlagParser,
    add_model_word,
    add_number,
    flag_of,
    help_of,
    human_int,
    program,
    run_program,
)
from orca_jax.helpers.console import lasting_output
from orca_jax.tools.plan.accelerators import (
    ACCELERATORS,
    ITL_TARGET_MS,
    PROMPT_TOKENS,
    Accelerator,
    Devices,
    PeakShares,
    parse_devices,
    parse_memory,
)
from orca_jax.values.config import (
    GPU_MEMORY_UTILIZATION,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    Quantization,
    page_dtype,
)
from orca_jax.values.errors import ConfigError, OrcaError
from orca_jax.values.platforms import platform_named


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Return the exit code: 1 if the model does not fit or the report was lost, 2 if a flag is wrong."""
    with lasting_output() as output:
        status = _main(argv)
    if output.is_lost and status == 0:
        return 1
    return status


def make_parser() -> FlagParser:
    """Return the parser of the command line."""
    made = FlagParser(
        prog=program("plan"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(ACCELERATORS)
    model = made.add_mutually_exclusive_group(required=True)
    add_model_word(model)
    model.add_argument(
        "--model", metavar="MODEL", help="directory with a config.json, ORG/NAME, or preset:<name>"
    )
    for name in ("revision", "download_dir"):
        made.add_argument(flag_of(name), help=help_of(name))
    made.add_argument(
        "--devices",
        required=True,
        metavar="NAMExN",
        help=f"N devices, such as h200x8, or one slice, v5e-8 as in Google Cloud; names: {known}; cpu: this machine",
    )
    types = get_args(DType)
    made.add_argument(
        "--dtype", choices=("auto", *types), default="auto", help="type of weights (default: auto)"
    )
    made.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="storage of the weights (default: as in config.json)",
    )
    made.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *get_args(KVCacheDType)),
        default="auto",
        help="type of the KV cache (default: --dtype)",
    )
    made.add_argument(
        "--max-num-seqs",
        type=human_int,
        metavar="N",
        help="rows; default: the most up to 256 of --context tokens",
    )
    made.add_argument(
        "--max-model-len", type=human_int, metavar="N", help="longest request; default: what fits"
    )
    made.add_argument(
        "--context",
        type=human_int,
        metavar="N",
        help="mean tokens of a running request (default: at most 1024)",
    )
    made.add_argument(
        "--prompt",
        type=human_int,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"tokens of the timed prompt (default: {PROMPT_TOKENS})",
    )
    _add_memory(made)
    add_number(
        made,
        "--itl-target-ms",
        ITL_TARGET_MS,
        "most milliseconds between tokens of a request, for the choice of a split",
        metavar="X",
    )
    made.add_argument(
        "--cost",
        metavar="tables:DIR,source=S",
        help="times from measured kernels or operators (profile:), as in simulate, for devices that have them",
    )
    _add_shares(made)
    made.add_argument(
        "--compile",
        action="store_true",
        help="TPUs: compile the programs of the best split with libtpu, and print their memory; takes a minute",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    made.add_config_flag()
    return made


def _add_memory(parser: FlagParser) -> None:
    """Add the flags of the memory of a device."""
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each device instead of the published one, or with cpu the free memory, such as 24GiB",
    )
    add_number(
        parser,
        "--gpu-memory-utilization",
        GPU_MEMORY_UTILIZATION,
        "share of an accelerator's memory",
        metavar="X",
    )


def _add_shares(parser: FlagParser) -> None:
    """Add a flag for each assumed share of a peak rate."""
    for name, value in PeakShares()._asdict().items():
        add_number(parser, f"--{name}-share", value, "assumed share of the peak rate", metavar="X")


def _main(argv: Sequence[str] | None) -> int:
    try:
        args = make_parser().parse_args(argv)
        report, has_fit = _plan(args)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    if has_fit:
        return 0
    return 1


def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Print the table and the choice. Returns the JSON object, and True if the model fits in some way."""
    # after the flags, so that help and errors come at once
    from orca_jax.helpers.bundled import model_directory
    from orca_jax.model.describe import read_model_config

    source = Path(args.model)
    if source.name == "config.json" and source.is_file():
        args.model = str(source.parent)
    directory = (
        model_directory(args.model, args.revision, args.download_dir, needs_weights=False)
        or args.model
    )
    model = read_model_config(directory)
    config = _checked(args, model)
    memory = None if args.memory is None else parse_memory(args.memory)
    devices = this_machine(memory) if args.devices == "cpu" else parse_devices(args.devices)
    if memory is not None and not platform_named(devices.kind.platform).is_host:
        devices = devices._replace(kind=devices.kind._replace(memory=memory))
    # Wrong flags are refused before JAX is imported. It is needed for the shapes of weights, and opens no accelerator.
    from orca_jax.assembly.products import choose_products
    from orca_jax.assembly.resolve import cache_directory, page_type
    from orca_jax.assembly.support import Facts, quantised
    from orca_jax.helpers.processor import multiplies_bfloat16
    from orca_jax.tools.plan.compiled import compiled_memory, topology_of
    from orca_jax.tools.plan.memory import Demand
    from orca_jax.tools.plan.options import choose, options
    from orca_jax.tools.plan.timing import kernel_times

    if args.compile:
        topology_of(devices, 1)  # refused before the table is printed
    platform = devices.kind.platform
    facts = Facts(
        config,
        model=quantised(config, model, str(directory)),
        platform=platform,
        source=str(directory),
    )
    dtype = choose_products(facts, cache_directory(config.compile_cache)).dtype
    pages = page_type(
        dtype, converts=platform_named(platform).converts_pages, has_bfloat16=multiplies_bfloat16()
    )
    demand = Demand(
        dtype=dtype,
        kv_cache_dtype=pages if args.kv_cache_dtype == "auto" else page_dtype(args.kv_cache_dtype),
        utilization=args.gpu_memory_utilization,
        context=args.context,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        quantization=args.quantization,
    )
    shares = PeakShares(*(getattr(args, f"{name}_share") for name in PeakShares._fields))
    kernels = kernel_times(args.cost, devices.name)
    found = options(model, devices, demand, args.prompt, shares, kernels)
    chosen = choose(found, args.itl_target_ms)
    from orca_jax.tools.plan.report import described, print_compiled, print_plan

    flags = [f"--dtype={args.dtype}"] * (args.dtype != "auto")
    flags += [f"--quantization={args.quantization}"] * (args.quantization is not None)
    print_plan(args.model, devices, found, chosen, flags)
    compiled = (
        compiled_memory(directory, devices, chosen.memory, demand)
        if args.compile and chosen
        else None
    )
    if compiled is not None and chosen is not None:
        print_compiled(compiled, chosen)
    report = {
        "model": {"name": args.model, **asdict(model)},
        "devices": {"name": devices.name, "number": devices.number, **devices.kind._asdict()},
        "demand": {**asdict(demand), "prompt": args.prompt, "shares": shares._asdict()},
        "options": [described(option) for option in found],
        "chosen": described(chosen) if chosen else None,
        "compiled": compiled,
    }
    return report, chosen is not None


def this_machine(memory: float | None) -> Devices:
    """Return the processors of this machine as devices. Their peak rates are unknown.

    Args:
        memory: bytes that are free, of all of them; None for those of this machine.
    """
    from orca_jax.exec.host import free_memory, num_processors

    number = num_processors()
    size = free_memory() if memory is None else memory
    return Devices(
        "cpu", Accelerator("cpu", size / number, 0, 0, 0, number, "this machine"), number
    )


def _checked(args: argparse.Namespace, model: ModelConfig) -> EngineConfig:
    """The settings of an engine. Raises ConfigError for wrong numbers, and flags that do not fit the model."""
    # it imports much, and help comes at once
    from orca_jax.assembly.support import Facts, check_support

    config = EngineConfig(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=args.max_model_len,
    )
    check_support(Facts(config, model=model), "settings", "model")
    for name in ("max_num_seqs", "max_model_len", "context", "prompt"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    for name in ("gpu_memory_utilization", *(f"{field}_share" for field in PeakShares._fields)):
        if not 0 < getattr(args, name) <= 1:
            raise ConfigError(f"{name} must be in (0, 1], got {getattr(args, name)}", param=name)
    if not args.itl_target_ms > 0:
        raise ConfigError(
            f"itl_target_ms must be above 0, got {args.itl_target_ms}", param="itl_target_ms"
        )
    return config


if __name__ == "__main__":
    sys.exit(run_program("plan", main))
