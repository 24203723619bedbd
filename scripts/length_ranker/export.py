"""A trained ranker as the scorer that the package loads: a calibration, and an Orbax checkpoint of a few arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orbax.checkpoint as ocp

from orca_jax.tools.ranker.scorer import Calibration, Scorer
from orca_jax.tools.ranker.storage import NAMES, PARAMS, as_scorer

if TYPE_CHECKING:
    from length_ranker.ranker import Ranker


def calibrate(scores: np.ndarray, lengths: np.ndarray, knots: int = 24) -> Calibration:
    """Fit lengths to scores by isotonic regression over groups of prompts with neighbouring scores.

    Args:
        scores: scores of prompts outside of the training data. float [N], N at least 1.
        lengths: output tokens of these prompts. float [N]
        knots: most groups; they are equally large.
    """
    order = np.argsort(scores, kind="stable")
    groups = np.array_split(order, min(knots, len(order)))
    weights = [float(len(group)) for group in groups]
    means = _ascending([float(np.mean(lengths[group])) for group in groups], weights)
    middles = [float(np.mean(scores[group])) for group in groups]
    return Calibration(np.asarray(middles, np.float32), np.asarray(means, np.float32))


def _ascending(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the closest ascending values in weighted least squares, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        mean = value
        total = weight
        count = 1
        while pools and pools[-1][0] >= mean:
            before, its_weight, its_count = pools.pop()
            mean = (before * its_weight + mean * total) / (its_weight + total)
            total = total + its_weight
            count = count + its_count
        pools.append((mean, total, count))
    ascending: list[float] = []
    for mean, _, count in pools:
        ascending += count * [mean]
    return ascending


def scorer_of(ranker: "Ranker", calibration: Calibration) -> Scorer:
    """Convert a trained ranker to a scorer in NumPy."""
    arrays = {
        "table": ranker.table(),
        "queries": ranker.queries[...],
        "hidden_kernel": ranker.hidden.kernel[...],
        "hidden_bias": _bias(ranker.hidden),
        "out_kernel": ranker.out.kernel[...],
        "out_bias": _bias(ranker.out),
    }
    return as_scorer(
        {name: np.asarray(array, np.float32) for name, array in arrays.items()}, calibration
    )


def save_scorer(scorer: Scorer, directory: Path) -> None:
    """Write `directory`/params, which must not exist. The table, nearly all of the data, is in half precision."""
    tree = {name: getattr(scorer, name) for name in NAMES}
    tree["table"] = tree["table"].astype(np.float16)
    knots = {"knot_scores": scorer.calibration.scores, "knot_tokens": scorer.calibration.tokens}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            directory.absolute() / PARAMS, args=ocp.args.PyTreeSave({**tree, **knots})
        )


def _bias(linear: Any) -> Any:
    return linear.bias[...]
