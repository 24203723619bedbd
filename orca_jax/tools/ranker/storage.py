"""Loads trained rankers: an Orbax checkpoint of a few arrays, which `scripts/length_ranker/export.py` writes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from orca_jax.tools.ranker.scorer import Calibration, Scorer
from orca_jax.values.errors import ConfigError

PARAMS = "params"
"""The folder of the checkpoint in the directory of a ranker."""
NAMES = ("table", "queries", "hidden_kernel", "hidden_bias", "out_kernel", "out_bias")
"""The arrays of a checkpoint, beside the knots of its calibration."""


def load_scorer(directory: Path) -> Scorer:
    """Read a checkpoint.

    Raises:
        ConfigError: it is another checkpoint; `param` is "length_predictor", and the message lists the mismatches.
    """
    folder = directory.absolute() / PARAMS
    if not (folder / "_METADATA").is_file():
        raise _not_a_ranker(directory, ["params/_METADATA is missing"])
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            wanted = (*NAMES, "knot_scores", "knot_tokens")
            args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
            item = {name: 0 for name in wanted}
            tree: dict[str, Any] = checkpointer.restore(
                folder, args=ocp.args.PyTreeRestore(item, restore_args=args)
            )
    except Exception as error:  # Orbax raises bare `Exception` for some broken files
        raise _not_a_ranker(directory, [str(error).partition("\n")[0]]) from error
    others = [
        f"{name}: type {array.dtype} is not a float type"
        for name, array in tree.items()
        if not _is_float(array)
    ]
    if others:
        raise _not_a_ranker(directory, others)
    arrays = jax.tree.map(lambda array: np.asarray(array, np.float32), tree)
    problems = _misfits(arrays)
    if problems:
        raise _not_a_ranker(directory, problems)
    calibration = Calibration(arrays["knot_scores"], arrays["knot_tokens"])
    return as_scorer(arrays, calibration)


def as_scorer(arrays: dict[str, np.ndarray], calibration: Calibration) -> Scorer:
    """Return a scorer of the arrays by name."""
    table, queries, hidden_kernel, hidden_bias, out_kernel, out_bias = (
        arrays[name] for name in NAMES
    )
    return Scorer(table, queries, hidden_kernel, hidden_bias, out_kernel, out_bias, calibration)


def _is_float(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _not_a_ranker(directory: Path, problems: list[str]) -> ConfigError:
    message = f"{directory} is not a length ranker: {'; '.join(problems)}; scripts/train_length_ranker.py trains one"
    return ConfigError(message, param="length_predictor")


def _misfits(arrays: dict[str, np.ndarray]) -> list[str]:
    table, queries, hidden = (arrays[name].shape for name in ("table", "queries", "hidden_kernel"))
    if len(table) != 2 or len(queries) != 2 or len(hidden) != 2:
        return ["table, queries and hidden_kernel must be matrices"]
    wanted = {
        "queries": (table[1], queries[1]),
        "hidden_kernel": (table[1] * queries[1] + 1, hidden[1]),
        "hidden_bias": (hidden[1],),
        "out_kernel": (hidden[1], 1),
        "out_bias": (1,),
        "knot_tokens": arrays["knot_scores"].shape,
    }
    shapes = {name: arrays[name].shape for name in wanted}
    problems = [
        f"{name}: shape {list(shape)}, must be {list(wanted[name])}"
        for name, shape in shapes.items()
        if shape != wanted[name]
    ]
    infinite = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    return problems + [f"{name}: some numbers are not finite" for name in infinite]
