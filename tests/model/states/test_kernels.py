"""Log probabilities of models with linear attention are those of transformers by the kernels for accelerators."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from orca_jax.kernels.linear_state import api
from tests.model.reference import mesh_of
from tests.model.states.server import Server
from tests.model.states.test_hybrids import arranged, difference, served

pytestmark = pytest.mark.usefixtures("quick_compiles")

CLOSE = (
    5e-4  # largest difference of log probabilities of order ten; factors of products have 16 bits
)
DELTAS, ADDED, LIGHTNING = "qwen3_next-1", "bamba-1", "minimax-2"


@pytest.mark.parametrize(
    "name",
    [DELTAS, *(pytest.param(name, marks=pytest.mark.slow) for name in (ADDED, LIGHTNING))],
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
