"""Adapters in the format of PEFT: read, checked against the model, and arranged as the devices hold them."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orca_jax.config import DType, LoraConfig, ModelConfig
from orca_jax.errors import CheckpointError, system_message
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.lora.peft_config import PeftConfig, read_config
from orca_jax.model.lora.stacks import group_of, groups_of, width_of, zero_values
from orca_jax.model.parameters import copied_columns
from orca_jax.model.stripes import DTYPES

WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 32 * 2**20
_PREFIX = "base_model.model."
_SIDES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_REMEDIES = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding": "adapters of the vocabulary are not supported",
    "modules_to_save": "modules_to_save is not supported",
    "lm_head": "adapters of the vocabulary are not supported",
    "embed": "adapters of the vocabulary are not supported",
    "wte": "adapters of the vocabulary are not supported",
    ".bias": "trained biases are not supported",
}
"""Reasons for the refusal of a tensor, by a part of its name."""


@dataclass(frozen=True)
class AdapterValues:
    """An adapter on the host.

    Attributes:
        digest: of its configuration and tensors: equal digests mean equal results.
        rank: before padding to the largest rank.
        values: see `stacks.value_shapes`, for all layers of the model.
    """

    digest: str
    rank: int
    values: Mapping[str, NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(each.nbytes for each in self.values.values())


class _AdaptedModule(NamedTuple):
    """A linear layer of the decoder, as a module of a checkpoint, or a part of one."""

    target: str
    layer: int
    weight: Weight


def read_adapter(directory: Path, model: ModelConfig, lora: LoraConfig, dtype: DType) -> AdapterValues:
    """Read an adapter.

    Args:
        directory: has adapter_config.json and adapter_model.safetensors.
        model: as the devices hold it, all layers.
        lora: the largest rank.
        dtype: of the arrays.

    Raises:
        CheckpointError: the files cannot be read, need something that is not supported, or do not fit the model. It
            lists every problem.
    """
    config = read_config(directory)
    if config.rank > lora.max_rank:
        problem = f"r {config.rank} is more than max_lora_rank {lora.max_rank}; start with a larger --max-lora-rank"
        raise CheckpointError(str(directory), [problem])
    try:
        with _open(directory / WEIGHTS) as (header, data, digest):
            digest.update(repr((config.rank, config.scale)).encode())
            values = _arrange(directory, header, data, config, model, lora, dtype)
            return AdapterValues(digest.hexdigest(), config.rank, values)
    except FileNotFoundError:
        other = (directory / "adapter_model.bin").exists()
        reason = "only adapter_model.bin: pickles are not read, since they may run code" if other else "missing"
        problem = f"{WEIGHTS}: {reason}; save the adapter with PEFT's save_pretrained(safe_serialization=True)"
        raise CheckpointError(str(directory), [problem]) from None
    except OSError as error:
        raise CheckpointError(str(directory), [f"{WEIGHTS}: cannot be read: {system_message(error)}"]) from None


@contextmanager
def _open(path: Path) -> Iterator[tuple[Mapping[str, Any], np.ndarray, Any]]:
    """The header and the data of a safetensors file, mapped, and a digest of both. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise OSError("it is not a safetensors file")
        try:
            header = json.loads(file.read(length))
            has_data = size > 8 + length
            data: np.ndarray = np.memmap(file, np.uint8, "r", 8 + length) if has_data else np.zeros(0, np.uint8)
        except (ValueError, RecursionError):
            raise OSError("its header is not valid JSON") from None
        if not isinstance(header, dict):
            raise OSError("its header is not a JSON object")
        header.pop("__metadata__", None)
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        digest.update(data)
        yield header, data, digest


def _tensor(key: str, entry: Any, data: np.ndarray, problems: list[str]) -> np.ndarray | None:
    """A tensor in float32, or None after a problem."""
    try:
        kind, shape, (begin, end) = DTYPES.get(entry["dtype"]), [int(n) for n in entry["shape"]], entry["data_offsets"]
        if kind is None:
            problems.append(f"{key}: type {entry['dtype']} is not supported, only {', '.join(DTYPES)}")
            return None
        if len(shape) != 2 or not 0 <= begin <= end <= data.size or end - begin != math.prod(shape) * kind.itemsize:
            raise ValueError("offsets")
    except (KeyError, TypeError, ValueError):
        problems.append(f"{key}: its entry in the header is wrong")
        return None
    values = np.frombuffer(data[begin:end].tobytes(), kind).reshape(shape).astype(np.float32)
    if not np.isfinite(values).all():
        problems.append(f"{key}: has values that are not finite")
        return None
    return values


def _places(model: ModelConfig) -> dict[str, list[_AdaptedModule]]:
    """The linear layers of the decoder by the names of modules in checkpoints."""
    family = FAMILIES[model.family]
    targets = {target for group in groups_of(model).values() for target in group.targets}
    places: dict[str, list[_AdaptedModule]] = {}
    for weight in family.weights(model):
        part = weight.path.split(".")
        if part[0] != "blocks" or part[-1] != "kernel" or part[-2] not in targets:
            continue
        for layer in range(model.num_layers):
            for key in (weight.key, *weight.others):
                for prefix in family.prefixes:
                    module = prefix + key.format(layer=layer).removesuffix(".weight")
                    places.setdefault(module, []).append(_AdaptedModule(part[-2], layer, weight))
    return places


def _arrange(
    directory: Path,
    header: Mapping[str, Any],
    data: np.ndarray,
    config: PeftConfig,
    model: ModelConfig,
    lora: LoraConfig,
    dtype: DType,
) -> dict[str, NDArray[Any]]:
    places, problems = _places(model), list[str]()
    modules: dict[str, dict[str, np.ndarray]] = {}
    for key, entry in sorted(header.items()):
        side = next((side for side in _SIDES if key.endswith(side)), None)
        module = key.removeprefix(_PREFIX).removesuffix(side or "")
        if side is None or module not in places:
            reason = next((why for part, why in _REMEDIES.items() if part in key), "no linear layer of this model")
            problems.append(f"{key}: {reason}")
            continue
        values = _tensor(key, entry, data, problems)
        if values is not None:
            modules.setdefault(module, {})[_SIDES[side]] = values
    if not modules and not problems:
        problems.append(f"{WEIGHTS} has no tensors")
    out = zero_values(model, lora, dtype)
    for module, sides in modules.items():
        if len(sides) < 2:
            if not problems:
                problems.append(f"{module}: lora_A and lora_B must both be there")
            continue
        problem = _problem_of_shapes(sides, places[module], model, config.rank)
        if problem is not None:
            problems.append(f"{module}: {problem}")
            continue
        with np.errstate(over="ignore"):  # found below
            for place in places[module]:
                _place_values(out, place, sides["A"], sides["B"] * config.scale, model, lora.max_rank)
    infinite = [name for name, each in out.items() if not np.isfinite(each.astype(np.float32)).all()]
    if infinite:
        problems.append(f"values of {', '.join(infinite)} are too large for {dtype}")
    if problems:
        raise CheckpointError(str(directory), problems)
    return out


def _problem_of_shapes(
    sides: Mapping[str, np.ndarray], places: list[_AdaptedModule], model: ModelConfig, rank: int
) -> str | None:
    place = places[0]
    _, _, group = group_of(place.target, model)
    inputs, part = width_of(group.inputs, model), place.weight.part
    outputs = _stored_width(place.target, model) if part is None else part.num_columns
    for side, needed in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if sides[side].shape != needed:
            return f"lora_{side} has shape {list(sides[side].shape)}, the model and r need {list(needed)}"
    return None


def _stored_width(target: str, model: ModelConfig) -> int:
    """The outputs of a linear layer in checkpoints: one copy of each key/value head."""
    _, _, group = group_of(target, model)
    width = width_of(group.outputs[group.targets.index(target)], model)
    return width // model.kv_copies if target in ("key", "value") else width


def _place_values(
    out: Mapping[str, NDArray[Any]],
    place: _AdaptedModule,
    a: np.ndarray,
    b: np.ndarray,
    model: ModelConfig,
    max_rank: int,
) -> None:
    """Write the matrices of one module, or the part of one, into the arrays of the adapter."""
    number, name, group = group_of(place.target, model)
    rank, first = a.shape[0], group.targets.index(place.target) * max_rank
    columns = np.arange(_stored_width(place.target, model))
    if place.target in ("key", "value") and model.kv_copies > 1:
        columns = copied_columns(range(len(columns) * model.kv_copies), model.kv_copies, model.head_dim)
    if place.weight.part is not None:
        columns = place.weight.part.column(columns)
    out[f"{name}.shrink"][place.layer, :, first : first + rank] = a.T
    out[place.target][place.layer, :rank] = b[columns].T
    out["active"][number] = 1
