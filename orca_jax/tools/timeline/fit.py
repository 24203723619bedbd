"""Fits the cost of an iteration to a timeline."""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orca_jax.sim.cost import LinearCost, WindowShares, WorkCounts, windows_of, work_of
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.writer import IterationRecord
from orca_jax.values.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

SOUND = 0.8  # least share of the variance that a sound fit explains


@dataclass(frozen=True)
class Fit:
    """A cost with the share of the variance of device times that it explains; at most 1."""

    cost: LinearCost
    r_squared: float

    @property
    def warning(self) -> str | None:
        """The reason to distrust predictions by this cost, or None if the fit is sound."""
        if self.r_squared >= SOUND:
            return None
        return (
            f"the cost explains {max(self.r_squared, 0):.0%} of the variance of the device times (r_squared "
            f"{self.r_squared:.2g}, below {SOUND}); figures predicted with it are not reliable: record more iterations "
            "of different sizes, on an idle machine"
        )

    @property
    def shown(self) -> dict[str, Any]:
        """The coefficients in seconds, and `r_squared`."""
        cost = {
            name: value
            for name, value in dataclasses.asdict(self.cost).items()
            if name != "buckets"
        }
        return {**cost, "r_squared": self.r_squared}


def fit_cost(timeline: Timeline) -> Fit:
    """Fit a cost to the device times of the iterations by least squares, without negative coefficients.

    The time of the host is the median time to select, plan and update.

    Raises:
        ConfigError: the timeline has no iteration.
    """
    if not timeline.iterations:
        raise ConfigError("the timeline has no iterations, so no cost can be fitted", param="trace")
    import numpy as np  # help comes without it

    windows = windows_of(timeline.head.cache.groups)
    work = [work_in(each, windows) for each in timeline.iterations]
    features = np.array(
        [(w.steps, w.num_tokens + w.padding, w.chunk_pairs + w.context) for w in work], np.float64
    )
    taken = np.array([each.device for each in timeline.iterations])
    weights = non_negative(features, taken)
    variance = float(np.sum((taken - taken.mean()) ** 2))
    missed = float(np.sum((taken - features @ weights) ** 2))
    per_iteration, per_token, per_pair = map(float, weights)
    cost = LinearCost(
        per_iteration, per_token, per_pair, host_seconds(timeline), timeline.head.buckets
    )
    return Fit(cost, 1 - missed / variance if variance else 1.0)


def host_seconds(timeline: Timeline) -> float:
    """The median time of the host to select, plan and update an iteration."""
    return statistics.median(
        [each.planned - each.selected + each.update for each in timeline.iterations]
    )


def work_in(iteration: IterationRecord, windows: WindowShares) -> WorkCounts:
    """The work of a recorded iteration, in a model with these windows."""
    # the model computes them as a chunk, and draws after each
    proposed = dict(iteration.proposed or ())
    parts = [
        (start, 1 + proposed.get(n, 0), n not in proposed) for n, start in iteration.increments
    ]
    parts += [(start, size, False) for _, start, size, _ in iteration.chunks]
    parts += [(start, size, size == 1) for _, start, size in iteration.repeats]
    draws = (
        len(iteration.increments)
        + len(iteration.repeats)
        + sum([samples for *_, samples in iteration.chunks])
    )
    draws += sum(proposed.values())
    return work_of(parts, draws, windows)._replace(
        launches=iteration.launches, padding=iteration.padding
    )


def non_negative(features: "np.ndarray", taken: "np.ndarray") -> "np.ndarray":
    """Solve by least squares; features with negative weights are left out, beginning with the most negative one."""
    import numpy as np

    scale = np.maximum(np.abs(features).max(axis=0), 1)
    kept = list(range(features.shape[1]))
    weights = np.zeros(features.shape[1])
    while kept:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], taken, rcond=None)[0]
        if found.min() >= 0:
            weights[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return weights
