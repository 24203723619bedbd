"""Table 1: for the paper's number of devices, the planner picks the paper's split of each model."""

from typing import Any

from lab.paper.effort import Effort
from lab.paper.gpt import MODELS
from lab.reproduce.rows import Row
from orca_jax.model.describe import read_model_config
from orca_jax.tools.plan.accelerators import ACCELERATORS, Devices, PeakShares
from orca_jax.tools.plan.memory import Demand
from orca_jax.tools.plan.options import choose, options
from orca_jax.tools.plan.timing import KernelTimes

DEVICE = "a100-40"
TARGET_MS = 100.0  # the planner's default
PROMPT = 512  # the planner's default, and the longest prompt of the paper


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """Return the results and their rows."""
    return reproduced()


def reproduced(kernels: KernelTimes | None = None) -> tuple[dict[str, Any], list[Row]]:
    """The results and their rows, with times from kernels or from rooflines."""
    rows = []
    found = {}
    for name, model in MODELS.items():
        devices = Devices(DEVICE, ACCELERATORS[DEVICE], model.num_devices)
        config = read_model_config(f"preset:gpt3-{name.lower()}")
        demand = Demand("float16", "float16", utilization=0.9)
        ways = options(config, devices, demand, PROMPT, PeakShares(), kernels)
        chosen = choose(ways, TARGET_MS)
        split = chosen.memory.split if chosen else None
        ours = "none" if split is None else f"{split.tensor} x {split.stages}"
        paper = f"{model.num_tensor} x {model.num_stages}"
        found[name] = {"ours": ours, "paper": paper, "devices": model.num_devices}
        text = f"{name} on {model.num_devices} A100 of 40 GB: intra-layer x inter-layer degree that the planner picks"
        rows.append(Row(f"table1.{name}", text, ours, paper, claim="C9", holds=ours == paper))
    return found, rows
