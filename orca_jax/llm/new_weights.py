"""Trees of parameters on their way to an engine in another process."""

from pathlib import Path
from typing import Any


def save_tree(params: Any, folder: Path) -> None:
    """Write a tree of parameters as an Orbax checkpoint. Imports JAX at the first call."""
    from orca_jax.assembly.weights import save

    save(params, folder)
