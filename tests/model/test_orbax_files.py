"""Orbax checkpoints of any layout are found, and only the parameters are read. Types and shapes are checked."""

import json
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

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.model.orbax import UP, Tree, assert_served, nested, refusal, save
from tests.model.reference import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith("orca_jax")
    )


@pytest.mark.parametrize(
    "dtype", [np.int32, np.uint8, np.bool_, np.complex64, jnp.float8_e4m3fn], ids=str
)
def test_other_types_than_floats_are_refused(
    model: Path, flat: dict[str, np.ndarray], dtype: Any
) -> None:
    """As in safetensors: a cast would change integers to weights, and complex numbers to their real part."""
    save(model / PARAMS, nested({**flat, UP: jnp.asarray(flat[UP]).astype(dtype)}))
    name = np.dtype(dtype).name
    error = refusal(model)
    assert error.problems == (
        f"{UP}: type {name} is not supported, only float64, float32, float16, bfloat16",
    )
    assert "orca-jax convert" in str(error)


@pytest.mark.parametrize("value", [3, "text"])
def test_leaves_that_are_not_arrays_are_refused(
    model: Path, flat: dict[str, np.ndarray], value: object
) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = nested({**flat, UP: value})
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(tree))
    assert refusal(model).problems[0].startswith(f"{UP}: type s")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16], ids=str)
def test_float_types_are_cast(model: Path, flat: dict[str, np.ndarray], dtype: Any) -> None:
    stored = {path: value.astype(dtype) for path, value in flat.items()}
    save(model / PARAMS, nested(stored))
    assert_served(
        model, {path: value.astype(np.float32) for path, value in stored.items()}, devices=2
    )


TRAINING: dict[str, Callable[[Tree], object]] = {
    "tuples and lists": lambda params: {
        "params": params,
        "opt_state": (np.ones(2), [np.ones(1)]),
        "step": np.int32(1),
    },
    "optax": lambda params: {
        "params": params,
        "opt_state": optax.adam(0.1).init(params),
        "step": 1,
    },
    "a key of jax.random": lambda params: {"params": params, "rng": jax.random.key(0)},
    "flax linen": lambda params: {
        "params": {"params": params},
        "batch_stats": {"mean": np.zeros(2)},
    },
    "flax nnx": lambda params: {"model": params, "optimizer": {"opt_state": [np.ones(2)]}},
    "a moving average": lambda params: {
        "params": params,
        "ema": jax.tree.map(np.zeros_like, params),
    },
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
    assert "the parameters are under ema_params" in error.problems[0] and "save_decoder" in str(
        error
    )


def test_a_tree_of_another_model_is_described(model: Path) -> None:
    save(model / PARAMS, {"encoder": {"kernel": np.ones(2)}, "layers": [np.ones(1), np.ones(1)]})
    error = refusal(model)
    assert (
        "the tree has encoder/kernel, layers/0, layers/1. For another tree than this decoder's"
        in error.problems[0]
        and "orca-jax convert" in str(error)
    )


def test_parameters_in_a_list_are_listed(model: Path, flat: dict[str, np.ndarray]) -> None:
    """Layers one by one, as in an unstacked model, are not the stacked parameters."""
    whole = nested(flat)
    layers = [jax.tree.map(lambda value, n=n: value[n], whole["blocks"]) for n in range(2)]
    save(model / PARAMS, {**whole, "blocks": layers})
    told = refusal(model).problems
    assert f"{UP}: missing" in told and "blocks.0.mlp.up.kernel: unexpected" in told


def manager(folder: Path, steps: Mapping[int, object], **options: Any) -> None:
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(**options)
    ) as checkpoints:
        for step, tree in steps.items():
            checkpoints.save(step, args=ocp.args.StandardSave(tree))


def older(flat: Mapping[str, np.ndarray]) -> Tree:
    return nested({path: value + 1 for path, value in flat.items()})


@pytest.mark.parametrize("inside", [PARAMS, "."])
@pytest.mark.parametrize(
    "options", [{}, {"step_prefix": "ckpt", "step_format_fixed_length": 8}], ids=["plain", "named"]
)
def test_the_latest_step_of_a_manager_is_served(
    model: Path,
    flat: dict[str, np.ndarray],
    inside: str,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {"params": nested(flat), "opt_state": [np.ones(2)]}
    manager(model / inside, {9: older(flat), 10: state}, **options)
    with caplog.at_level("INFO"):
        assert_served(model, flat)
    assert "step 10 of" in logged(
        caplog
    ) and "9, 10. To serve another one, make params a link" in logged(caplog)


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
    assert (model / PARAMS / "commit_success.txt").is_file() and not (
        model / PARAMS / "_METADATA"
    ).exists()
    assert_served(model, flat)
    shutil.rmtree(model / PARAMS)
    with ocp_v1.training.Checkpointer(model / PARAMS) as checkpoints:
        checkpoints.save(1, older(flat))
        checkpoints.save(2, nested(flat))
    assert_served(model, flat)


def test_folders_of_arrays_without_one_file_for_all(
    model: Path, flat: dict[str, np.ndarray]
) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(model / PARAMS, args=ocp.args.PyTreeSave(nested(flat)))
    assert_served(model, flat)
    # the values: without a check they would be zeros
    next((model / PARAMS / UP).glob("[0-9]*")).unlink()
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
    [
        (without_metadata, "copy the whole folder again"),
        (unfinished, "save it again"),
        (msgpack, "msgpack"),
    ],
)
def test_refusals_name_the_next_command(
    plain: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(plain)
    error = refusal(plain.parent)
    assert words in str(error) and "orca-jax convert --model SOURCE --output DIR" in str(error)


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
    with pytest.raises(
        CheckpointError, match=r"params.*\n.*the folder cannot be read: No such file"
    ):
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
