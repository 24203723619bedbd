"""The files of weights in a model directory, known by their names. Checked before JAX is imported."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from orca_jax.helpers.buckets.views import located, shown
from orca_jax.helpers.bundled import is_gguf, is_preset
from orca_jax.helpers.hub import INDEX, SINGLE
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.orbax_files import orbax_root, read_tree
from orca_jax.values.config import LoadFormat
from orca_jax.values.errors import CheckpointError, ConfigError

ADAPTER = "adapter_config.json"
_VARIANT = re.compile(r"model\.([\w-]+)(\.safetensors(?:\.index\.json)?)")
_PART = re.compile(r"model-\d+-of-\d+\.safetensors")
_END = 2**16  # bytes at both ends of a file
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weights(source: str | Path, load_format: LoadFormat) -> None:
    """Refuse a model without weights in this format. The values are not read.

    Raises:
        ConfigError: the weights are of an unknown kind.
        CheckpointError: there are no weights.
    """
    if load_format == "dummy":
        return
    if is_preset(str(source)):
        assert load_format == "auto", "refused by assembly/support.py"
        return
    directory = Path(source)
    if is_gguf(str(source)):
        assert load_format == "auto", "refused by assembly/support.py"
        return
    if load_format == "orbax":
        if orbax_root(directory) is None:
            read_tree(directory / PARAMS)  # raises the error of a missing checkpoint
    elif load_format == "safetensors" or orbax_root(directory) is None:
        check_safetensors(directory)


def has_safetensors(directory: Path) -> bool:
    """True if there is a file or an index that `load_safetensors` reads."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def check_safetensors(directory: Path) -> None:
    """Refuse a directory without safetensors.

    Raises:
        ConfigError: it has other weights.
        CheckpointError: it has no weights.
    """
    if (directory / ADAPTER).exists():  # transformers would add it to the weights
        raise ConfigError(
            f"{directory} holds an adapter ({ADAPTER}): give the directory of its model as model, and the adapter in "
            f"lora_modules with enable_lora (docs/adapters.md); or remove {ADAPTER} to serve the model without it",
            param="model",
        )
    if has_safetensors(directory):
        return
    pickled = _names(directory, _PICKLED)
    if pickled:
        raise ConfigError(
            f"{directory} holds only pickled weights ({', '.join(pickled[:3])}), and loading them may run code; "
            "convert them to safetensors",
            param="model",
        )
    if orbax_root(directory) is not None:
        message = f"{directory} has no safetensors, but an Orbax checkpoint; use --load-format auto"
        raise ConfigError(message, param="load_format")
    problem = f"it has neither {SINGLE} nor {INDEX} nor an Orbax checkpoint in {PARAMS}/"
    raise CheckpointError(shown(directory), [problem], remedy=_other_weights(directory))


def files_digest(source: Path) -> str:
    """A digest of the files of a model that is soon made: of names, sizes, times of change, and both ends of each.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    paths = sorted(path for path in source.rglob("*") if path.is_file()) or [source]
    for path in paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            name = path.relative_to(source).as_posix()
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
            digest.update(file.read(_END))
            file.seek(max(0, status.st_size - _END))
            digest.update(file.read(_END))
    return digest.hexdigest()


def _names(directory: Path, patterns: Iterable[str]) -> list[str]:
    """The names of the files that match one of some patterns, sorted."""
    found: list[str] = []
    for pattern in patterns:
        found += [path.name for path in directory.glob(pattern)]
    return sorted(found)


def _other_weights(directory: Path) -> str:
    """The advice for a directory without known weights, from the names of its files."""
    if located(directory) is not None:
        return f"Give the folder with the weights, for a step of Orbax {shown(directory)}/STEP"
    names = _names(directory, ("*.safetensors*", "*.gguf"))
    variants = [name for name in names if _VARIANT.fullmatch(name)]
    if variants:
        plain = _VARIANT.sub(r"model\2", variants[0])
        return f"It has a variant: to serve it, rename {variants[0]} to {plain}"
    if any(_PART.fullmatch(name) for name in names):
        return f"It has parts of the weights without their list: download {INDEX} too"
    if any(name.endswith(".gguf") for name in names):
        return "It has GGUF weights: give the path of the file as the model"
    return (
        "To download the weights: hf download ORG/NAME --include '*.safetensors*' --local-dir DIR"
    )
