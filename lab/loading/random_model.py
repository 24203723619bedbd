"""Writes model directories with random weights, tensor by tensor, so that any size needs little memory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from lab.peers.inputs import checkpoint_shapes
from orca_jax.errors import ConfigError
from orca_jax.hub import INDEX
from orca_jax.model.describe import preset_values, read_model_config

FILE_BYTES = 5 * 10**9  # most bytes of a file of weights, as with transformers
_NOISE = 2**22  # random numbers, repeated
_STANDARD_DEVIATION = 0.02


def write_random_model(preset: str, folder: Path, seed: int = 0) -> None:
    """Write a model directory of the shape of a preset, with bfloat16 weights and no tokenizer.

    Raises:
        ConfigError: the preset is unknown or of another family than GPT-2 and Llama, or `folder` exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a new directory, or leave --random out to measure it", param="model")
    shapes = checkpoint_shapes(read_model_config(preset))
    folder.mkdir(parents=True)
    from orca_jax.model.files.stripes import DTYPES

    noise = np.random.default_rng(seed).standard_normal(_NOISE, np.float32) * np.float32(_STANDARD_DEVIATION)
    noise = noise.astype(DTYPES["BF16"])
    files = list(_split(shapes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(names, name)
        _write_file(folder / name, {name: shapes[name] for name in names}, noise)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(preset_values(preset), indent=2), encoding="utf-8")


def _split(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + _num_bytes(shape) > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _num_bytes(shape)
    yield names


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], noise: np.ndarray) -> None:
    """Write a safetensors file: the length of its header, the header, and the values."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shapes.items()):
            is_vector = len(shape) == 1
            size = _num_bytes(shape) // 2
            if is_vector:
                file.write(np.full(size, 0 if name.endswith(".bias") else 1, noise.dtype).tobytes())
                continue
            values = memoryview(np.roll(noise, number).view(np.uint16)).cast("B")
            for start in range(0, size, _NOISE):
                file.write(values[: 2 * min(_NOISE, size - start)])
