"""`adapter_config.json` of PEFT: each key is read, or known to be harmless, or refused."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_jax.values.checks import json_value, open_regular, unique_keys
from orca_jax.values.errors import CheckpointError, system_message

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20

_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"})
_HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
        "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
"""Keys of training, and keys of which the tensors hold the result."""

_OFF: tuple[object, ...] = (None, False, "none", [], {})
"""Values of all other keys, by which a feature is off."""

_CHANGES_BASE = (
    "init_lora_weights {} changes the weights of the base model; convert the adapter with PEFT to "
    "a plain one"
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftConfig:
    """The values of an adapter that its tensors do not show."""

    rank: int
    alpha: float
    is_rank_stabilised: bool

    @property
    def scale(self) -> float:
        """The factor on the product of both matrices."""
        return float(self.alpha / (self.rank**0.5 if self.is_rank_stabilised else self.rank))


def config_bytes(directory: Path) -> bytes:
    """The content of the configuration of an adapter. Raises OSError, also for another kind of file or a large one."""
    with os.fdopen(open_regular(directory / CONFIG), "rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise OSError(f"it has more than {MAX_CONFIG_BYTES} bytes")
    return data


def read_config(directory: Path) -> PeftConfig:
    """Read the configuration of an adapter.

    Raises:
        CheckpointError: the file is missing or wrong, or the adapter needs something that is not supported. The error
            names every such key.
    """
    try:
        values = json_value(config_bytes(directory).decode(), object_pairs_hook=unique_keys)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        reason = f"it is not valid: {str(error)[:300]}"
        if isinstance(error, OSError):
            reason = system_message(error)
        if isinstance(error, FileNotFoundError):
            reason = "it does not exist"
        raise CheckpointError(str(directory), [f"{CONFIG}: {reason}"], _REMEDY) from None
    problems = _problems(values)
    if problems:
        raise CheckpointError(str(directory), [f"{CONFIG}: {problem}" for problem in problems])
    rank = values["r"]
    return PeftConfig(
        rank, float(values.get("lora_alpha", 8)), values.get("use_rslora", False) is True
    )


_REMEDY = (
    "an adapter is a directory written by PEFT's save_pretrained, with adapter_model.safetensors"
)


def _problems(values: Mapping[str, Any]) -> list[str]:
    problems = []
    kind = values.get("peft_type")
    rank = values.get("r")
    alpha = values.get("lora_alpha", 8)
    if kind != "LORA":
        problems.append(f"peft_type {_shown(kind)} is not supported, only 'LORA'")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        problems.append(f"r must be an integer of at least 1, got {_shown(rank)}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    # also NaN, and integers beyond all floats
    if not is_number or not abs(alpha) <= sys.float_info.max:
        problems.append(f"lora_alpha must be a number, got {_shown(alpha)}")
    if not isinstance(values.get("use_rslora"), bool | None):
        problems.append(f"use_rslora must be true or false, got {_shown(values['use_rslora'])}")
    start = values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        problems.append(_CHANGES_BASE.format(_shown(start)))
    problems += [
        f"{key} {_shown(str(value))} is not supported; train the adapter without it"
        for key, value in values.items()
        if key not in _READ | _HARMLESS and value not in _OFF
    ]
    return problems


def _shown(value: object) -> str:
    return repr(value)[:80]
