"""Expected times of a plan from measured kernels, for cards that have tables."""

from dataclasses import replace
from pathlib import Path

from orca_jax.sim.cost import work_of
from orca_jax.tools.plan.kernels import Kernels
from orca_jax.tools.plan.memory import Capacity
from orca_jax.tools.plan.roofline import Times
from orca_jax.tools.plan.tables import CARDS, TABLES, TableSettings, parse_settings, tables_cost
from orca_jax.values.checks import short
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError


class KernelTimes:
    """Times from the tables of a folder: `tables:DIR,source=vllm`, as in `simulate`, without a card and a model.

    Args:
        text: the flag.
        devices: the name of the kind of devices.

    Raises:
        ConfigError: the flag or a table is wrong; `param` is "cost".
    """

    def __init__(self, text: str, devices: str) -> None:
        folder, settings = parse_settings(text, TableSettings(card=_card(devices), model="-"))
        self._settings = settings
        self._kernels = Kernels(Path(folder), settings.card, settings.source, settings.kind)

    def times(self, model: ModelConfig, fit: Capacity, prompt: int) -> Times | None:
        """Times of a copy with all rows at the mean context, and of a prompt; None: no kernels for this split."""
        split = fit.split
        try:
            settings = replace(self._settings, tensor=split.tensor)
            cost = tables_cost(self._kernels, settings, model)
        except ConfigError:
            return None
        rows = fit.rows
        increments = work_of([(fit.context - 1, 1, True)] * rows, rows)._replace(members=rows)
        first = work_of([(0, min(prompt, fit.max_model_len), False)], 1)._replace(members=1)
        interval = cost.host + split.stages * max(cost.stages(increments, split.stages))
        seconds = cost.host + sum(cost.stages(first, split.stages))
        return Times(interval, fit.num_rows / interval, seconds)


def kernel_times(text: str | None, devices: str) -> KernelTimes | None:
    """Times from the tables of a flag; None without a flag, and for devices that have no tables.

    Raises:
        ConfigError: the flag or a table is wrong; `param` is "cost".
    """
    if text is None:
        return None
    if not text.startswith(TABLES):
        raise ConfigError(f"cost must be tables:DIR,source=S, got {short(text)}", param="cost")
    return KernelTimes(text, devices) if devices in CARDS.values() else None


def _card(devices: str) -> str:
    return next(card for card, name in CARDS.items() if name == devices)
