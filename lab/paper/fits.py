"""All fitted numbers of the simulation, and fits that did not see the figures that they predict.

The seconds of a stage come from bytes and operations (`lab/paper/gpt.py`). Two shares of the peak rates stand for
all that the formula leaves out: all-reduces, hops between stages, unembedding, attention of prompts, and the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lab.paper.gpt import Efficiency

Kind = Literal["fitted", "held out", "unfitted"]


@dataclass(frozen=True)
class Fit:
    """The numbers of a simulation.

    Attributes:
        kind: the relation of its numbers to the figures.
        efficiencies: shares of the peak rates of a device's memory and products, by model.
        request: seconds of a layer for each request, whose attention ORCA does not batch with others'.
        ft_factor: seconds of FasterTransformer's stages in a pipeline, as a multiple of ORCA's.
        in_flight: iterations in flight on a single stage.
    """

    kind: Kind
    efficiencies: Mapping[str, Efficiency]
    request: float = 2.0e-6
    ft_factor: float = 1.3
    in_flight: int = 2


def one_pair(memory: float, compute: float) -> dict[str, Efficiency]:
    """The same shares for all models."""
    return dict.fromkeys(("13B", "101B", "175B", "341B"), Efficiency(memory, compute))


FITTED = Fit(
    "fitted",
    {
        "13B": Efficiency(memory=0.495, compute=0.40),  # in no figure with numbers; a copy of 101B
        "101B": Efficiency(memory=0.495, compute=0.40),
        "175B": Efficiency(memory=0.53, compute=0.48),
        "341B": Efficiency(memory=0.54, compute=0.57),
    },
)
"""Nine numbers: six shares, for the smallest errors of ORCA in Figures 9b and 10; `request`, from Figure 9b alone, by
least squares with free shares; `ft_factor`, from the curves of FasterTransformer on 175B and 341B; `in_flight`.

Algorithm 1 as written has one iteration in flight on a single stage. The paper's latencies on 101B ask for two.
"""
UNFITTED = Fit("unfitted", one_pair(0.445, 0.445), request=0.0, ft_factor=1.0)
"""The shares of another system on another device: BLOOM-176B on eight A100 of 80 GB.

Splitwise's performance model has 47.6 ms for a token of one request and 65.4 ms for one of 32.
"""
NUM_FITTED = 9
