"""Orbax checkpoints of any layout are found, and only the parameters are read. Types and sizes are checked."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from flax import nnx

from orca_jax.errors import CheckpointError, ConfigError
from orca_jax.model import checkpoint as orbax_reader
from orca_jax.model import orbax_files
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.load import abstract_decoder, load_decoder
from orca_jax.model.orbax_files import PARAMS
from orca_jax.model.parameters import flat_parameters, stored_shape
from tests.model.reference import mesh_of

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}
UP = "blocks.mlp.up.kernel"

Tree = dict[str, Any]


def nested(flat: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


@pytest.fixture(scope="module")
def flat() -> dict[str, np.ndarray]:
    """The parameters of a small model by path, unpadded."""
    config = config_from_hf(CONFIG)
    _, shapes = abstract_decoder(config, "float32", mesh_of(1))
    draw = np.random.default_rng(0)
    sizes = {path: stored_shape(path, leaf.shape, config) for path, leaf in flat_parameters(shapes).items()}
    return {path: draw.standard_normal(size).astype(np.float32) for path, size in sizes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def save(folder: Path, tree: object) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def assert_served(directory: Path, flat: Mapping[str, np.ndarray], devices: int = 1) -> None:
    decoder = load_decoder(directory, dtype="float32", mesh=mesh_of(devices))
    for path, value in flat_parameters(nnx.state(decoder)).items():
        rows = flat[path].shape[0]
        np.testing.assert_array_equal(np.asarray(value)[:rows], flat[path], err_msg=path)
        assert not np.asarray(value)[rows:].any(), "the padding of the vocabulary is zeros"


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    return caught.value


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("orca_jax"))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.complex64, jnp.float8_e4m3fn], ids=str)
def test_other_types_than_floats_are_refused(model: Path, flat: dict[str, np.ndarray], dtype: Any) -> None:
    """As in safetensors: a cast would change integers to weights, and complex numbers to their real part."""
    save(model / PARAMS, nested({**flat, UP: jnp.asarray(flat[UP]).astype(dtype)}))
    name = np.dtype(dtype).name
    error = refusal(model)
    assert error.problems == (f"{UP}: type {name} is not supported, only float64, float32, float16, bfloat16",)
    assert "convert_checkpoint.py" in str(error)


@pytest.mark.parametrize("value", [3, "text"])
def test_leaves_that_are_not_arrays_are_refused(model: Path, flat: dict[str, np.ndarray], value: object) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = nested({**flat, UP: value})
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(tree))
    assert refusal(model).problems[0].startswith(f"{UP}: type s")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16], ids=str)
def test_float_types_are_cast(model: Path, flat: dict[str, np.ndarray], dtype: Any) -> None:
    stored = {path: value.astype(dtype) for path, value in flat.items()}
    save(model / PARAMS, nested(stored))
    assert_served(model, {path: value.astype(np.float32) for path, value in stored.items()}, devices=2)


TRAINING: dict[str, Callable[[Tree], object]] = {
    "tuples and lists": lambda params: {"params": params, "opt_state": (np.ones(2), [np.ones(1)]), "step": np.int32(1)},
    "optax": lambda params: {"params": params, "opt_state": optax.adam(0.1).init(params), "step": 1},
    "a key of jax.random": lambda params: {"params": params, "rng": jax.random.key(0)},
    "flax linen": lambda params: {"params": {"params": params}, "batch_stats": {"mean": np.zeros(2)}},
    "flax nnx": lambda params: {"model": params, "optimizer": {"opt_state": [np.ones(2)]}},
    "a moving average": lambda params: {"params": params, "ema": jax.tree.map(np.zeros_like, params)},
    "empty nodes": lambda params: {"params": {**params, "nothing": {}}, "opt_state": None},
}


@pytest.mark.parametrize("kind", TRAINING)
def test_training_states_serve_their_parameters(
    model: Path, flat: dict[str, np.ndarray], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The leaves beside the parameters may have any kind, since they are not opened."""
    save(model / PARAMS, TRAINING[kind](nested(flat)))
    with caplog.at_level("INFO"):
        assert_served(model, flat)
    assert kind == "empty nodes" or "is served; not read: " in logged(caplog)


def test_states_of_nnx_serve(model: Path, flat: dict[str, np.ndarray]) -> None:
    """`nnx.state` adds ".value" to each parameter; one of ours is named `value` itself."""
    state = nnx.State({})
    for path, value in flat.items():
        *parents, name = path.split(".")
        node: Any = state
        for parent in parents:
            node = node.setdefault(parent, nnx.State({}))
        node[name] = nnx.Param(jnp.asarray(value))
    save(model / PARAMS, state)
    kept = json.loads((model / PARAMS / "_METADATA").read_text())["tree_metadata"]
    assert str(("blocks", "attention", "value", "kernel", "value")) in kept
    assert_served(model, flat)


def test_parameters_at_another_place_are_named(model: Path, flat: dict[str, np.ndarray]) -> None:
    save(model / PARAMS, {"ema_params": nested(flat), "step": 1})
    error = refusal(model)
    assert "the parameters are under ema_params" in error.problems[0] and "save_decoder" in str(error)


def test_a_tree_of_another_model_is_described(model: Path) -> None:
    save(model / PARAMS, {"encoder": {"kernel": np.ones(2)}, "layers": [np.ones(1), np.ones(1)]})
    error = refusal(model)
    assert error.problems[0].endswith("the tree has encoder, layers") and "convert_checkpoint.py" in str(error)


def test_parameters_in_a_list_are_listed(model: Path, flat: dict[str, np.ndarray]) -> None:
    """Layers one by one, as in an unstacked model, are not the stacked parameters."""
    whole = nested(flat)
    layers = [jax.tree.map(lambda value, n=n: value[n], whole["blocks"]) for n in range(2)]
    save(model / PARAMS, {**whole, "blocks": layers})
    told = refusal(model).problems
    assert f"{UP}: missing" in told and "blocks.0.mlp.up.kernel: unexpected" in told


def manager(folder: Path, steps: Mapping[int, object], **options: Any) -> None:
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options)) as checkpoints:
        for step, tree in steps.items():
            checkpoints.save(step, args=ocp.args.StandardSave(tree))


def older(flat: Mapping[str, np.ndarray]) -> Tree:
    return nested({path: value + 1 for path, value in flat.items()})


@pytest.mark.parametrize("inside", [PARAMS, "."])
@pytest.mark.parametrize(
    "options", [{}, {"step_prefix": "ckpt", "step_format_fixed_length": 8}], ids=["plain", "named"]
)
def test_the_latest_step_of_a_manager_is_served(
    model: Path, flat: dict[str, np.ndarray], inside: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"params": nested(flat), "opt_state": [np.ones(2)]}
    manager(model / inside, {9: older(flat), 10: state}, **options)
    with caplog.at_level("INFO"):
        assert_served(model, flat)
    assert "step 10 of" in logged(caplog) and "9, 10. To serve another one, make params a link" in logged(caplog)


def test_another_step_is_served_through_a_link(model: Path, flat: dict[str, np.ndarray]) -> None:
    manager(model.parent / "steps", {9: nested(flat), 10: older(flat)})
    (model / PARAMS).symlink_to(model.parent / "steps" / "9")
    assert_served(model, flat)


def test_named_items_of_a_step(model: Path, flat: dict[str, np.ndarray]) -> None:
    with ocp.CheckpointManager(model / PARAMS) as checkpoints:
        items = {
            "params": ocp.args.StandardSave(nested(flat)),
            "ema": ocp.args.StandardSave(older(flat)),
            "data": ocp.args.JsonSave({"position": 3}),
        }
        checkpoints.save(5, args=ocp.args.Composite(**items))
    assert_served(model, flat)
    shutil.rmtree(model / PARAMS / "5" / "params")
    shutil.copytree(model / PARAMS / "5" / "ema", model / PARAMS / "5" / "other")
    error = refusal(model)
    assert error.problems == ("it holds several trees: ema, other",) and "ln -sfn" in str(error)


def test_checkpoints_of_version_1(model: Path, flat: dict[str, np.ndarray]) -> None:
    """Orbax v1 writes commit_success.txt at the top, and the tree in a folder below."""
    ocp_v1.save(model / PARAMS, {"params": nested(flat), "opt_state": [np.ones(2)], "step": 3})
    assert (model / PARAMS / "commit_success.txt").is_file() and not (model / PARAMS / "_METADATA").exists()
    assert_served(model, flat)
    shutil.rmtree(model / PARAMS)
    with ocp_v1.training.Checkpointer(model / PARAMS) as checkpoints:
        checkpoints.save(1, older(flat))
        checkpoints.save(2, nested(flat))
    assert_served(model, flat)


def test_folders_of_arrays_without_one_file_for_all(model: Path, flat: dict[str, np.ndarray]) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(nested(flat)))
    assert_served(model, flat)
    next((model / PARAMS / UP).glob("[0-9]*")).unlink()  # the values: without a check they would be zeros
    assert refusal(model).problems[0].startswith(f"{UP}: cannot be read")


@pytest.mark.parametrize("inside", [PARAMS, "."])
def test_unfinished_steps_are_not_served(
    model: Path, flat: dict[str, np.ndarray], inside: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = model / inside
    manager(steps, {9: nested(flat), 10: older(flat)})
    (steps / "10" / "commit_success.txt").unlink()
    shutil.copytree(steps / "10", steps / "11.orbax-checkpoint-tmp")
    assert_served(model, flat)
    assert "step 10 of" in logged(caplog) and logged(caplog).count("is incomplete") == 1


def without_metadata(folder: Path) -> None:
    (folder / "_METADATA").unlink()


def unfinished(folder: Path) -> None:
    without_metadata(folder)
    (folder / "commit_success.txt").unlink()
    (folder / "state.orbax-checkpoint-tmp").mkdir()


def msgpack(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "checkpoint").write_bytes(b"\x80")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(without_metadata, "copy the whole folder again"), (unfinished, "save it again"), (msgpack, "msgpack")],
)
def test_refusals_name_the_next_command(plain: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(plain)
    error = refusal(plain.parent)
    assert words in str(error) and "python scripts/convert_checkpoint.py SOURCE DESTINATION" in str(error)


def test_safetensors_beside_orbax_are_logged(
    plain: Path, flat: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    (plain.parent / "model.safetensors").write_bytes(b"")
    with caplog.at_level("INFO"):
        assert_served(plain.parent, flat)
    assert "load_format safetensors" in logged(caplog)


def test_load_formats_that_a_directory_does_not_have(plain: Path) -> None:
    with pytest.raises(ConfigError, match="use --load-format auto") as caught:
        load_decoder(plain.parent, dtype="float32", mesh=mesh_of(1), load_format="safetensors")
    assert caught.value.param == "load_format"
    shutil.rmtree(plain)
    with pytest.raises(CheckpointError, match=r"params.*\n.*the folder cannot be read: No such file"):
        load_decoder(plain.parent, dtype="float32", mesh=mesh_of(1), load_format="orbax")


@pytest.mark.parametrize("name", ["params", "steps"])
def test_a_checkpoint_without_a_model_directory_gets_advice(plain: Path, name: str) -> None:
    """A user names the folder that Orbax wrote, and it has no config.json."""
    if name == "steps":
        plain = Path(shutil.move(plain, plain.parents[1] / "steps" / "3")).parent
    with pytest.raises(ConfigError, match=rf"config\.json is missing.*ln -s {plain} MODEL/params"):
        read_model_config(plain)


def test_numbered_folders_of_a_trainer_are_not_checkpoints_of_orbax(model: Path) -> None:
    (model / "checkpoint_500").mkdir()
    (model / "checkpoint_500" / "model.safetensors").write_bytes(b"")
    assert "neither model.safetensors nor" in refusal(model).problems[0]


@pytest.fixture(scope="module")
def saved(flat: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / PARAMS
    save(folder, nested(flat))
    return folder


@pytest.fixture
def plain(model: Path, saved: Path) -> Path:
    """A checkpoint to damage, in its model directory."""
    return Path(shutil.copytree(saved, model / PARAMS))


# Hostile checkpoints: the work is bounded before it begins.


def edit_metadata(folder: Path, change: Callable[[Tree], object]) -> None:
    path = folder / "_METADATA"
    metadata = json.loads(path.read_text())
    change(metadata["tree_metadata"])
    path.write_text(json.dumps(metadata))


def leaf(*keys: str) -> Tree:
    path = [{"key": key, "key_type": 2} for key in keys]
    return {"key_metadata": path, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}


def test_leaves_beside_the_parameters_are_not_opened(
    model: Path, flat: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of opened arrays is that of the parameters, and the metadata is parsed once."""
    save(model / PARAMS, {"params": nested(flat)})
    edit_metadata(model / PARAMS, lambda tree: tree.update({str(n): leaf("opt_state", str(n)) for n in range(5_000)}))
    opened: list[str] = []
    parsed: list[int] = []
    real_open, real_loads = orbax_reader.tensorstore.open, orbax_files.json.loads
    monkeypatch.setattr(
        orbax_reader.tensorstore,
        "open",
        lambda spec, **settings: opened.append(spec["kvstore"]["path"]) or real_open(spec, **settings),
    )
    monkeypatch.setattr(orbax_files.json, "loads", lambda text: parsed.append(len(text)) or real_loads(text))
    assert_served(model, flat)
    assert sorted(opened) == sorted(f"params.{path}/" for path in flat)
    assert len([size for size in parsed if size > 100_000]) == 1


def test_unexpected_leaves_are_not_opened(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_metadata(plain, lambda tree: tree.update({str(n): leaf("more", str(n)) for n in range(5_000)}))
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


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '{"tree_metadata": 3}', "9" * 100_000])
def test_metadata_that_is_none(plain: Path, content: str) -> None:
    (plain / "_METADATA").write_text(content)
    error = refusal(plain.parent)
    assert error.problems[0].startswith("_METADATA") and len(str(error)) < 1000


def test_large_metadata_is_not_read(plain: Path) -> None:
    with (plain / "_METADATA").open("wb") as file:
        file.truncate(2**34)  # without disk space
    assert refusal(plain.parent).problems == (f"_METADATA has more than {orbax_files.MAX_METADATA_BYTES} bytes",)


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


def test_chunks_larger_than_their_array_are_refused(model: Path, flat: dict[str, np.ndarray]) -> None:
    """A chunk is read as a whole, so a chunk of a terabyte would need that memory."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(nested(flat)))
    array = model / PARAMS / UP / ".zarray"
    array.write_text(json.dumps({**json.loads(array.read_text()), "chunks": [2, 2**20, 2**20]}))
    assert refusal(model).problems == (f"{UP}: chunks of [2, 1048576, 1048576] values are larger than the array",)
