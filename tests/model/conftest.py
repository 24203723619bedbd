"""A small model, and a checkpoint of it in Orbax's format."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.describe import config_from_hf
from orca_jax.model.load import abstract_decoder
from orca_jax.model.parameters import flat_parameters, stored_shape
from tests.model.orbax import CONFIG, nested, save
from tests.model.reference import mesh_of


@pytest.fixture(scope="module")
def flat() -> dict[str, np.ndarray]:
    """The parameters of a small model by path, unpadded."""
    config = config_from_hf(CONFIG)
    _, shapes = abstract_decoder(config, "float32", mesh_of(1))
    draw = np.random.default_rng(0)
    sizes = {
        path: stored_shape(path, leaf.shape, config)
        for path, leaf in flat_parameters(shapes).items()
    }
    return {path: draw.standard_normal(size).astype(np.float32) for path, size in sizes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


@pytest.fixture(scope="module")
def saved(flat: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / PARAMS
    save(folder, nested(flat))
    return folder


@pytest.fixture
def plain(model: Path, saved: Path) -> Path:
    """A checkpoint to damage, in its model directory."""
    return Path(shutil.copytree(saved, model / PARAMS))
