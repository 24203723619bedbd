"""The types of the functions that replace weights, and the refusals of engines without replacement."""

from collections.abc import Callable
from typing import Any, NoReturn

from orca_jax.errors import ConfigError

PutInPlace = Callable[[Callable[[], None]], None]
"""Replaces the weights; calls its argument after each parameter. No iteration may be in flight."""

PrepareUpdate = Callable[[Any], PutInPlace]
"""Checks a tree of parameters, or a checkpoint at a path. It raises ConfigError, with the weights unchanged."""


def refuse_toy(source: Any) -> NoReturn:
    """Refuse an update of the toy. Raises ConfigError."""
    raise ConfigError("the toy model has no weights to replace", param="model")


def refuse_cluster(source: Any) -> NoReturn:
    """Refuse an update of an engine over several processes. Raises ConfigError."""
    message = "weights are replaced in engines of one process: use nnodes 1, or replicas with an update of each"
    raise ConfigError(message, param="nnodes")


def refuse_quantised(source: Any) -> NoReturn:
    """Refuse an update of quantised weights. Raises ConfigError."""
    message = "quantised weights cannot be replaced, since each update would round them: leave quantization out"
    raise ConfigError(message, param="quantization")
