"""Log probabilities of models with states and latents are those of transformers by the kernels for accelerators."""

from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from orca_jax.kernels.linear_state import api
from orca_jax.kernels.ragged_attention import triton_latents
from orca_jax.kernels.ragged_attention.api import BACKENDS
from orca_jax.kernels.ragged_attention.tpu import latents as tpu_latents
from tests.covering import slow
from tests.model.reference import mesh_of
from tests.model.states.server import Server
from tests.model.states.test_hybrids import arranged, check, difference, served

pytestmark = pytest.mark.usefixtures("quick_compiles")

CLOSE = (
    5e-4  # largest difference of log probabilities of order ten; factors of products have 16 bits
)
DELTAS, ADDED, LIGHTNING = "qwen3_next-1", "bamba-1", "minimax-2"


@pytest.mark.parametrize(
    "name",
    [DELTAS, *(slow(name) for name in (ADDED, LIGHTNING))],
)
def test_log_probabilities_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = next(each for each in api.BACKENDS if each.name == "triton")
    kernels = Mock(wraps=forced.load().attend)
    monkeypatch.setattr(forced.load(), "attend", kernels)
    monkeypatch.setattr(api, "BACKENDS", (forced._replace(platform=None),))
    server = Server([arranged(name, tmp_path)], mesh_of(1))
    assert 0 < difference(name, served(name, server)) <= CLOSE
    assert kernels.called


@pytest.mark.parametrize(
    ("name", "backend", "function", "page_size"),
    [
        ("deepseek_v2-0", tpu_latents, "write_and_attend", 128),
        slow("deepseek_v2-2", triton_latents, "attend", 16),
    ],
    ids=["tpu", "triton"],
)
def test_kernels_of_latents(
    name: str,
    backend: ModuleType,
    function: str,
    page_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels are interpreted."""
    interpreted = partial(getattr(backend, function), interpret=True)
    monkeypatch.setattr(backend, function, interpreted)
    (row,) = (each for each in BACKENDS if each.module == backend.__name__)
    check(name, Server([arranged(name, tmp_path)], mesh_of(1), row.name, page_size))
