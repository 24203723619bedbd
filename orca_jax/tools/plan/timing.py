"""Expected times of a plan from the costs of measured times, for devices and splits that have them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orca_jax.sim.cost import IterationCost, work_of
from orca_jax.tools.plan.kernels import Kernels
from orca_jax.tools.plan.memory import Capacity
from orca_jax.tools.plan.profile import PROFILE, read_profile
from orca_jax.tools.plan.roofline import Times
from orca_jax.tools.plan.tables import CARDS, TABLES, TableSettings, parse_settings, tables_cost
from orca_jax.values.checks import short
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError

type CostOf = Callable[[ModelConfig, int], IterationCost]
"""The cost of a model on stages of this many devices. Raises ConfigError if no table has it."""


class KernelTimes:
    """Times from measured ones.

    Args:
        cost_of: the cost of a model on stages of some devices.
    """

    def __init__(self, cost_of: CostOf) -> None:
        self._cost_of = cost_of

    def times(self, model: ModelConfig, fit: Capacity, prompt: int) -> Times | None:
        """Times of a copy with all rows at the mean context, and of a prompt; None: no times for this split."""
        split = fit.split
        try:
            cost = self._cost_of(model, split.tensor)
        except ConfigError:
            return None
        rows = fit.rows
        size = min(prompt, fit.max_model_len)

        def interval(chunk: int) -> float:
            """Seconds between two tokens of a request, with tokens of prompts in each batch."""
            members = [(fit.context - 1, 1, True)] * rows + [(0, chunk, False)] * bool(chunk)
            work = work_of(members, rows)._replace(members=len(members))
            return cost.host + split.stages * max(cost.stages(work, split.stages))

        first = work_of([(0, size, False)], 1)._replace(members=1)
        seconds = cost.host + sum(cost.stages(first, split.stages))
        answer = 2 * (fit.context - size)
        loaded = interval(round(rows * size / answer)) if answer > 0 else None
        alone = interval(0)
        return Times(alone, fit.num_rows / alone, seconds, loaded)


def kernel_times(text: str | None, devices: str) -> KernelTimes | None:
    """Times from the tables of a flag of `simulate`; None without a flag, and for devices that have no tables.

    Kernels of a card are `tables:DIR,source=vllm`, without card and model. Operators of a layer are
    `profile:PREFIX,layers=N` with what else a split needs. They are those of the devices at hand, and of one split.

    Raises:
        ConfigError: the flag or a table is wrong; `param` is "cost".
    """
    if text is None:
        return None
    if text.startswith(PROFILE):
        return KernelTimes(_of_profile(text))
    if not text.startswith(TABLES):
        usage = "tables:DIR,source=S or profile:PREFIX,layers=N"
        raise ConfigError(f"cost must be {usage}, got {short(text)}", param="cost")
    if devices not in CARDS.values():
        return None
    return KernelTimes(_of_tables(text, devices))


def _of_tables(text: str, devices: str) -> CostOf:
    card = next(card for card, name in CARDS.items() if name == devices)
    folder, given = parse_settings(text, TableSettings(card=card, model="-"))
    kernels = Kernels(Path(folder), card, given.source, given.kind)
    return lambda model, tensor: tables_cost(kernels, replace(given, tensor=tensor), model)


def _of_profile(text: str) -> CostOf:
    cost = read_profile(text)
    own = cost.settings

    def cost_of(model: ModelConfig, tensor: int) -> IterationCost:
        if (model.num_layers, tensor * own.replicas) != (own.layers, own.devices):
            raise ConfigError("the profile has another model or split", param="cost")
        return cost

    return cost_of
