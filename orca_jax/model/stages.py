"""The layers of each pipeline stage."""

from dataclasses import replace
from typing import NamedTuple

from orca_jax.values.config import ModelConfig


class LayerSpan(NamedTuple):
    """The layers `start` to `stop` of a model of `num_layers`, as one stage has them.

    The first stage has the embedding as well, and the last one has the final norm and the unembedding.
    """

    start: int
    stop: int
    num_layers: int

    @property
    def size(self) -> int:
        """Number of layers."""
        return self.stop - self.start

    @property
    def is_first(self) -> bool:
        """True if the input is token ids; otherwise it is the hidden vectors of the stage before."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """True if the output goes to the unembedding."""
        return self.stop == self.num_layers

    @property
    def is_whole(self) -> bool:
        """True for a model in one stage."""
        return self.is_first and self.is_last


def whole(config: ModelConfig) -> LayerSpan:
    """All layers in one stage."""
    return LayerSpan(0, config.num_layers, config.num_layers)


def of_span(config: ModelConfig, span: LayerSpan) -> ModelConfig:
    """The configuration of a model with the layers of `span` alone."""
    return replace(config, layers=config.layers[span.start : span.stop])


def spans(config: ModelConfig, stages: int) -> tuple[LayerSpan, ...]:
    """Spread the layers over stages, with a difference of one layer at most.

    The stages in the middle get the extra layers, since the first and the last one have the vocabulary.
    """
    layers = config.num_layers
    assert stages <= layers, "refused by assembly/support.py"
    extra = (stages - layers % stages) // 2  # the first stage with one more layer
    sizes = [
        layers // stages + (extra <= stage < extra + layers % stages) for stage in range(stages)
    ]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(
        LayerSpan(start, start + size, layers) for start, size in zip(starts, sizes, strict=True)
    )
