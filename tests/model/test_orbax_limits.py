"""Hostile checkpoints of Orbax: the work is bounded before it begins."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model import checkpoint as orbax_reader
from orca_jax.model import orbax_files
from tests.model.orbax import UP, Tree, assert_served, nested, refusal, save


def edit_metadata(folder: Path, change: Callable[[Tree], object]) -> None:
    path = folder / "_METADATA"
    metadata = json.loads(path.read_text())
    change(metadata["tree_metadata"])
    path.write_text(json.dumps(metadata))


def leaf(*keys: str) -> Tree:
    path = [{"key": key, "key_type": 2} for key in keys]
    return {
        "key_metadata": path,
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }


def test_leaves_beside_the_parameters_are_not_opened(
    model: Path, flat: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of opened arrays is that of the parameters, and the metadata is parsed once."""
    save(model / PARAMS, {"params": nested(flat)})
    edit_metadata(
        model / PARAMS,
        lambda tree: tree.update({str(n): leaf("opt_state", str(n)) for n in range(5_000)}),
    )
    opened: list[str] = []
    parsed: list[int] = []
    real_open, real_value = orbax_reader.tensorstore.open, orbax_files.json_value
    monkeypatch.setattr(
        orbax_reader.tensorstore,
        "open",
        lambda spec, **settings: (
            opened.append(spec["kvstore"]["path"]) or real_open(spec, **settings)
        ),
    )
    monkeypatch.setattr(
        orbax_files, "json_value", lambda text: parsed.append(len(text)) or real_value(text)
    )
    assert_served(model, flat)
    assert sorted(opened) == sorted(f"params.{path}/" for path in flat)
    assert len([size for size in parsed if size > 100_000]) == 1


def test_unexpected_leaves_are_not_opened(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_metadata(
        plain, lambda tree: tree.update({str(n): leaf("more", str(n)) for n in range(5_000)})
    )
    error = refusal(plain.parent)
    assert len(error.problems) == 5_000 and len(str(error)) < 10_000
    monkeypatch.setattr(orbax_files, "MAX_LEAVES", 5_000)
    assert "leaves, and at most 5000 are read" in refusal(plain.parent).problems[0]


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {},
        {"key_metadata": 3, "value_metadata": {}},
        {"key_metadata": [7], "value_metadata": {}},
        {"key_metadata": [], "value_metadata": []},
        leaf(*"a" * 100_000),
    ],
    ids=["list", "empty", "number", "key", "value", "deep"],
)
def test_descriptions_that_are_none(plain: Path, entry: object) -> None:
    edit_metadata(plain, lambda tree: tree.update(bad=entry))
    assert refusal(plain.parent).problems[0].startswith("_METADATA: ")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", "{}", '{"tree_metadata": 3}', "9" * 100_000]
)
def test_metadata_that_is_none(plain: Path, content: str) -> None:
    (plain / "_METADATA").write_text(content)
    error = refusal(plain.parent)
    assert error.problems[0].startswith("_METADATA") and len(str(error)) < 1000


def test_large_metadata_is_not_read(plain: Path) -> None:
    with (plain / "_METADATA").open("wb") as file:
        file.truncate(2**34)  # without disk space
    assert refusal(plain.parent).problems == (
        f"_METADATA has more than {orbax_files.MAX_METADATA_BYTES} bytes",
    )


def test_the_number_of_files_is_limited(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_files, "MAX_FILES", 5)
    assert "more than 5 " in refusal(plain.parent).problems[0]
    shutil.rmtree(plain)
    for step in range(8):
        (plain / str(step)).mkdir(parents=True)
    monkeypatch.setattr(orbax_files, "MAX_ENTRIES", 7)
    assert refusal(plain.parent).problems == ("the folder has more than 7 entries",)


def test_folders_that_contain_themselves(plain: Path, flat: dict[str, np.ndarray]) -> None:
    (plain / "again").symlink_to(plain)
    assert_served(plain.parent, flat)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_sharding", "d/more"])
def test_pipes_do_not_block(plain: Path, name: str) -> None:
    (plain / name).unlink(missing_ok=True)
    os.mkfifo(plain / name)
    assert refusal(plain.parent).problems == (f"{Path(name).name} is not a regular file",)


def test_chunks_larger_than_their_array_are_refused(
    model: Path, flat: dict[str, np.ndarray]
) -> None:
    """A chunk is read as a whole, so a chunk of a terabyte would need that memory."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(nested(flat)))
    array = model / PARAMS / UP / ".zarray"
    array.write_text(json.dumps({**json.loads(array.read_text()), "chunks": [2, 2**20, 2**20]}))
    assert refusal(model).problems == (
        f"{UP}: chunks of [2, 1048576, 1048576] values are larger than the array",
    )
