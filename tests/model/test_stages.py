"""The layers of pipeline stages."""

import pytest

from orca_jax.model.describe import config_from_hf
from orca_jax.model.stages import LayerSpan, spans


@pytest.mark.parametrize(
    "sizes", [(3,), (2, 1), (1, 2, 1), (2, 2, 1), (1, 2, 1, 1), (1, 2, 2, 1), (2, 2, 2, 1)], ids=str
)
def test_stages_in_the_middle_have_the_extra_layers(sizes: tuple[int, ...]) -> None:
    """The first and the last stage have the vocabulary."""
    num_layers = sum(sizes)
    config = config_from_hf({"model_type": "llama", "num_hidden_layers": num_layers})
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    assert spans(config, len(sizes)) == tuple(
        LayerSpan(start, start + size, num_layers)
        for start, size in zip(starts, sizes, strict=True)
    )
