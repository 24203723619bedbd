"""The record of transformers for small models of many families, one file for each family.

A record has for each model its config.json, the shape of each tensor, a prompt with greedy ids, and some log
probabilities. Weights are drawn from the name and the shape of a tensor alone, so they are not stored. This module
needs only NumPy and safetensors, and runs on Python 3.11 too: scripts/record_families writes the same directories.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[2] / "fixtures" / "families"
PROMPT, NEW = 20, 24  # tokens of the prompt, and generated ones
PLACES = (0, 11, PROMPT - 1, PROMPT + 9, PROMPT + NEW - 1)  # tokens with recorded log probabilities


class Recorded(NamedTuple):
    """A model, and the results of transformers."""

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    ids: np.ndarray  # [PROMPT + NEW]
    logprobs: np.ndarray  # [PLACES, V]

    def write(self, folder: Path) -> None:
        """Write config.json and the weights."""
        write(folder, self.config, self.shapes)


def write(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a model directory."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: values(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor: all of them differ from those that would switch a part off."""
    random = np.random.default_rng(zlib.crc32(f"{name} {shape}".encode()))
    is_scale = ("norm" in name or ".ln_" in name or "layer_scalar" in name) and not name.endswith(
        "bias"
    )
    std = 0.9 if "embed" in name or "wte" in name else 0.3
    return np.asarray(std * random.standard_normal(shape) + (1.0 if is_scale else 0.0), np.float32)


def names() -> list[str]:
    """The families with a record."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def load(family: str) -> list[Recorded]:
    """The models of a family."""
    with np.load(FOLDER / f"{family}.npz") as stored:
        texts = json.loads(stored["texts"].tobytes())
        return [
            Recorded(
                text["config"],
                text["shapes"],
                stored[f"ids_{number}"],
                stored[f"logprobs_{number}"],
            )
            for number, text in enumerate(texts)
        ]


def save(family: str, models: list[Recorded]) -> None:
    """Write the record of a family."""
    texts = json.dumps(
        [{"config": model.config, "shapes": model.shapes} for model in models],
        separators=(",", ":"),
    )
    arrays = {"texts": np.frombuffer(texts.encode(), np.uint8)}
    for number, model in enumerate(models):
        arrays |= {f"ids_{number}": model.ids, f"logprobs_{number}": model.logprobs}
    np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
