"""Files of safetensors with a model's tensors, plain or in a form of `forms.py`."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from orca_jax.helpers.console import Progress
from orca_jax.helpers.hub import INDEX, SINGLE
from orca_jax.tools.convert.export import ExportedTensor
from orca_jax.tools.convert.forms import GROUPS, MatrixTensors, Settings, WrittenForm
from orca_jax.values.errors import ConfigError

MAX_FILE_BYTES = 2 * 2**30
"""The bytes after which a file is written: as many are in memory at once, beside the model."""


def write_safetensors(
    tensors: Iterable[ExportedTensor],
    form: WrittenForm | None,
    dtype: np.dtype,
    folder: Path,
    progress: Progress,
) -> Settings | None:
    """Write tensors in this order. Returns the `quantization_config` of the form; None for plain ones.

    Args:
        tensors: those of a model.
        form: the form of its matrices; None: all are plain.
        dtype: type of plain tensors.
        folder: takes model.safetensors, or several files and their index.
        progress: called after each tensor.

    Raises:
        ConfigError: the matrices cannot be in this form; `param` is "output_format".
        OSError: a file cannot be written.
    """
    found = list(tensors)
    quantised: set[str] = set()
    group = 0
    if form is not None:
        quantised = {each.key for each in found if each.is_matrix and form.fits(each.shape)}
        group = _group_of([each for each in found if each.key in quantised], form)
    files = _TensorFiles(folder)
    for number, tensor in enumerate(found, start=1):
        values = tensor.read()
        if form is not None and tensor.key in quantised:
            of_scale = group or tensor.shape[1]
            parts = form.parts(values.astype(np.float32), of_scale)
            files.add({f"{_stem(tensor.key)}.{name}": part for name, part in parts.items()})
        else:
            files.add({tensor.key: values.astype(dtype)})
        progress(number, len(found))
    files.close()
    if form is None:
        return None
    plain = [
        _stem(each.key)
        for each in found
        if each.key not in quantised and len(each.shape) == 2 and each.key.endswith(".weight")
    ]
    return form.settings(group, plain)


def _stem(key: str) -> str:
    return key.removesuffix(".weight")


def _group_of(matrices: list[ExportedTensor], form: WrittenForm) -> int:
    """The inputs that share a scale: the largest usual number that divides those of all matrices. 0: all inputs."""
    if not matrices:
        raise ConfigError(
            "the model has no matrix [outputs, inputs] in its layers that fits this form; choose safetensors",
            param="output_format",
        )
    if not form.has_groups:
        return 0
    for group in GROUPS:
        if not any(each.shape[1] % group for each in matrices):
            return group
    odd = next(each for each in matrices if each.shape[1] % GROUPS[-1])
    raise ConfigError(
        f"{odd.key} has {odd.shape[1]} inputs, which no groups of {GROUPS[-1]} or more fill; choose w8a16 or fp8",
        param="output_format",
    )


class _TensorFiles:
    """The files of a new folder, written one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: MatrixTensors = {}
        self._bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, tensors: MatrixTensors) -> None:
        """Take some tensors, which stay in one file."""
        for key, values in tensors.items():
            self._held[key] = np.ascontiguousarray(values).reshape(values.shape)
            self._bytes += values.nbytes
        if self._bytes >= MAX_FILE_BYTES:
            self._write()

    def close(self) -> None:
        """Write what is left; name the files, and write the index if there are several."""
        if self._held or not self._written:
            self._write()
        if len(self._written) == 1:
            self._written[0][0].rename(self._folder / SINGLE)
            return
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, (path, keys) in enumerate(self._written, start=1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(keys, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        path = self._folder / f".{len(self._written)}.part"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(self._folder.stat().st_mode & 0o666)  # the library lets the owner alone read it
        self._written.append((path, list(self._held)))
        self._total += self._bytes
        self._held = {}
        self._bytes = 0
