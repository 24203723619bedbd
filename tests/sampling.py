"""Short ways to write the sampling of a row."""

from typing import Any

from orca_jax.values.request import SamplingParams
from orca_jax.values.step import RowSampling


def row_sampling(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    num_prompt: int = 0,
    **fields: Any,
) -> RowSampling:
    """A row's sampling from the fields of its parameters; greedy by default."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, **fields)
    return RowSampling(params, seed, num_prompt)


GREEDY = row_sampling()
