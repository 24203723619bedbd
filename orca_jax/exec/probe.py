"""A launch without requests, with the work of a busy iteration: to warm programs up and to measure them."""

import math

import numpy as np
from numpy.typing import NDArray

from orca_jax.exec.pack import Layout
from orca_jax.values.config import ExecutorConfig

_CONTEXT = 256  # tokens of each running request, if it may have as many


def probe(
    layout: Layout, config: ExecutorConfig, num_tokens: int | None = None
) -> NDArray[np.int32]:
    """The vector of a launch with one token for each of many running requests, and a part of a prompt in the rest.

    It has `num_tokens` tokens, by default as many as fit. Its keys, values and states go to blocks without a request,
    and nothing else is written: no token has a row.
    """
    size = num_tokens or layout.num_tokens
    context = min(_CONTEXT, config.max_model_len)
    running = size if size <= config.num_rows else config.num_rows - 1
    prompt = min(size - running, config.max_model_len)
    lengths = np.array([1] * running + [prompt] * (prompt > 0), np.int32)
    contexts = np.array([context] * running + [prompt] * (prompt > 0), np.int32)
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    used = len(lengths)
    view["token_row"][:] = config.num_rows
    view["positions"][:running] = context - 1
    view["positions"][running : running + prompt] = np.arange(prompt)
    view["query_start"][:used] = np.cumsum(lengths) - lengths
    view["query_len"][:used] = lengths
    view["context_len"][:used] = contexts
    shape = len(layout.windows), used, layout.num_pages
    blocks = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) % min(
        config.cache.num_blocks
    )
    layout.write_blocks(view, blocks, np.arange(used, dtype=np.int32), contexts - lengths)
    if layout.has_states:
        view["source"][:used] = view["target"][:used] = np.arange(used)
    return vector
