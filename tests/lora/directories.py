"""Random adapters in PEFT's format for the models of tests/fixtures/reference, and models merged with them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.model.reference import REFERENCE

ADAPTERS = REFERENCE.parent / "adapters"
RECORDED: Mapping[str, str] = {
    path.name: json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))[
        "base_model_name_or_path"
    ]
    for path in sorted(ADAPTERS.iterdir())
}
"""The model of each recorded adapter."""

LLAMA = "llama-12-heads-3-groups"
TARGETS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def write_adapter(
    folder: Path,
    seed: int,
    targets: Sequence[str] = TARGETS,
    rank: int = 2,
    *,
    base: Path = REFERENCE / LLAMA,
    **config: Any,
) -> Path:
    """Write an adapter of the model `base` with random matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    random, tensors = np.random.default_rng(seed), {}
    for key, weight in load_file(base / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            outputs, inputs = weight.shape
            name = f"base_model.model.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.3 * random.normal(size=(rank, inputs)).astype(
                np.float32
            )
            tensors[f"{name}.lora_B.weight"] = 0.3 * random.normal(size=(outputs, rank)).astype(
                np.float32
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(adapter: Path, folder: Path, *, base: Path = REFERENCE / LLAMA) -> Path:
    """Write the model `base` with the products of an adapter added to its weights."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights, tensors = (
        load_file(folder / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            product = tensors[f"{module}.lora_B.weight"].astype(np.float64) @ a.astype(np.float64)
            name = f"{module.removeprefix('base_model.model.')}.weight"
            weights[name] = (weights[name] + config["lora_alpha"] / config["r"] * product).astype(
                np.float32
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
