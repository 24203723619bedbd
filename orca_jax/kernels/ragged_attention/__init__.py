"""Attention of a merged batch, split by request inside one call (paper section 3.2, "selective batching")."""

from orca_jax.kernels.kv_pages import RowArrays
from orca_jax.kernels.ragged_attention.api import (
    NO_WINDOW,
    BackendChoice,
    Scores,
    attend_pages,
    choose_backend,
    explain_choice,
    implementations,
    prepare,
    ragged_attention,
    write_and_attend,
)

__all__ = [
    "NO_WINDOW",
    "BackendChoice",
    "RowArrays",
    "Scores",
    "attend_pages",
    "choose_backend",
    "explain_choice",
    "implementations",
    "prepare",
    "ragged_attention",
    "write_and_attend",
]
