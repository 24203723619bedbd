"""Measures one iteration under other options of the compiler and another attention, beside the engine's own."""

from functools import partial
from typing import Any

from lab.device_check.part import Setting, Skip, Write, attempt
from lab.device_check.rates import copy_rate
from lab.device_check.steps import Model, bytes_read, measure_rows
from orca_jax.exec import programs as engine_programs
from orca_jax.exec.compile import compiler_options

GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "XLA's limit of memory": {"xla_gpu_memory_limit_slop_factor": 95},
    "no CUDA graphs": {"xla_gpu_enable_command_buffer": ""},
    "graphs with branches": {"xla_gpu_enable_command_buffer": f"{GRAPHS},CONDITIONAL,WHILE"},
}
ROWS = 64


def variants(what: str, setting: Setting, write: Write) -> None:
    """Measure the preset `what` with 64 rows under each variant, and with Triton's attention."""
    model = Model(setting, f"preset:{what}")
    rows = 4 if setting.dry_run else ROWS
    try:
        decoder = model.load()
    except Skip as reason:
        write(model=what, skipped=str(reason))
        return
    sizes = bytes_read(decoder), copy_rate(setting)
    measure = partial(measure_rows, model, decoder, rows, sizes, lambda **row: None, profiled=False)
    programs: Any = engine_programs  # the engine has no setting for such options
    try:
        for name, options in VARIANTS.items():
            changed = {} if setting.dry_run else options  # a CPU's compiler has no such options

            def with_options(*device: Any, changed: dict[str, Any] = changed, **facts: Any) -> Any:
                return {**compiler_options(*device, **facts), **changed}

            programs.compiler_options = with_options
            attempt(write, measure, variant=name, rows=rows)
    finally:
        programs.compiler_options = compiler_options
    attention = "reference" if setting.dry_run else "triton"
    attempt(
        write, partial(measure, attention=attention), variant=f"attention by {attention}", rows=rows
    )
