"""Files that both sides of a comparison read: the workload as JSON, and a model directory with a tokenizer."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.peers.tokenizer import write_tokenizer
from orca_jax.helpers.bundled import is_preset, model_directory
from orca_jax.model.describe import preset_values, read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.tools.bench.workload.generate import (
    WorkloadRequest,
    workload_from_args,
    workload_settings,
)
from orca_jax.values.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

WORKLOAD_FILE = "workload.json"
_STANDARD_DEVIATION = 0.02  # of random weights, as in GPT-2


@dataclass(frozen=True)
class Inputs:
    """The files of a comparison."""

    workload: Path
    model: Path
    vocab_size: int


def write_inputs(args: argparse.Namespace, folder: Path) -> Inputs:
    """Write the workload and the model that the flags describe into a folder. Raises ConfigError."""
    model = read_model_config(args.model)
    workload = workload_from_args(
        args, vocab_size=model.vocab_size, max_model_len=model.max_positions, rate=None
    )
    path = folder / WORKLOAD_FILE
    write_workload(
        path, workload, {**workload_settings(args), "model": args.model, "seed": args.seed}
    )
    return Inputs(
        path.absolute(), model_for_peers(args.model, args.seed, folder / "model"), model.vocab_size
    )


def write_workload(
    path: Path, workload: Sequence[WorkloadRequest], settings: dict[str, Any]
) -> None:
    """Write a workload: its settings, and for each request the arrival in seconds, the ids and the output tokens."""
    requests = [
        {"arrival": one.arrival, "prompt_ids": list(one.prompt_ids), "num_output": one.num_output}
        for one in workload
    ]
    path.write_text(json.dumps({"settings": settings, "requests": requests}), encoding="utf-8")


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Read what `write_workload` wrote."""
    requests = json.loads(path.read_text(encoding="utf-8"))["requests"]
    return [
        WorkloadRequest(one["arrival"], tuple(one["prompt_ids"]), one["num_output"])
        for one in requests
    ]


def model_for_peers(model: str, seed: int, folder: Path) -> Path:
    """Return the directory of a model in Hugging Face's format; one with random weights is written into `folder`.

    Args:
        model: a model directory or "demo"; or "preset:<name>" or a directory without weights, whose weights are random.
        seed: seed of random weights.
        folder: made if it does not exist.

    Raises:
        ConfigError: the model is unknown.
    """
    path = None if is_preset(model) else Path(model_directory(model)).absolute()
    if path is not None and any(path.glob("*.safetensors")):
        return path
    config = read_model_config(model)
    hf = (
        preset_values(model)
        if path is None
        else json.loads((path / "config.json").read_text(encoding="utf-8"))
    )
    import numpy as np  # help comes without it
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    family = FAMILIES[config.family]
    weights = {
        name: _values(name, shape, random) for name, shape in checkpoint_shapes(config).items()
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = {**hf, "architectures": [family.architectures[0]]}
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    write_tokenizer(folder, config.vocab_size)
    return folder.absolute()


def _values(name: str, shape: tuple[int, ...], random: "np.random.Generator") -> "np.ndarray":
    """Return random matrices, biases of zero and scales of one."""
    import numpy as np

    if len(shape) > 1:
        return random.standard_normal(shape, np.float32) * np.float32(_STANDARD_DEVIATION)
    return np.full(shape, 0 if name.endswith(".bias") else 1, np.float32)


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors in Hugging Face's format."""
    from jax.sharding import AbstractMesh

    from orca_jax.model.files.expert_stacks import OF_EXPERT
    from orca_jax.model.load import abstract_decoder
    from orca_jax.model.parameters import layers_of, stored_shapes
    from orca_jax.model.sharding import TENSOR_AXIS
    from orca_jax.model.weights import tensor_shape

    family = FAMILIES[config.family]
    _, state = abstract_decoder(config, "float32", AbstractMesh((1,), (TENSOR_AXIS,)))
    parameters = stored_shapes(state, config)
    shapes = dict[str, tuple[int, ...]]()
    for weight in family.weights(config):
        name = f"{family.prefixes[0] if weight.prefixed else ''}{weight.key}"
        shape = tensor_shape(weight, parameters[weight.path])
        count = 1
        if weight.is_of_experts and config.experts is not None:
            count = config.experts.count
        if name.endswith(OF_EXPERT):  # one tensor for all experts of a layer
            name = name.removesuffix(OF_EXPERT)
            shape = (count, *shape)
            count = 1
        for layer in layers_of(weight.path, config) if weight.stacked else (0,):
            shapes |= {name.format(layer=layer, expert=expert): shape for expert in range(count)}
    return shapes
