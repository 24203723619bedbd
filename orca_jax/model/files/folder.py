"""The safetensors of a model directory: one file, or the files of an index. Their headers are read once."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from orca_jax.helpers.buckets.views import shown
from orca_jax.helpers.hub import INDEX, SINGLE
from orca_jax.model.files.opened import CHANGED, open_file
from orca_jax.model.files.safetensors import StoredTensor, read_header
from orca_jax.model.weight_files import check_safetensors
from orca_jax.values.checks import json_value
from orca_jax.values.errors import CheckpointError

MAX_INDEX_BYTES = 32 * 2**20  # the largest known ones have 15 MB
MAX_HEADER_BYTES = 32 * 2**20  # of all files together
MAX_TENSORS = 500_000  # of a checkpoint; the largest known ones have 150,000
MAX_FILES = 4_000


class _Header(NamedTuple):
    """The tensors of a file, and the state in which it had them."""

    state: Hashable
    tensors: Mapping[str, StoredTensor]


@dataclass(eq=False)
class SafetensorsFolder:
    """The safetensors of a model directory, known from their headers until the model is loaded.

    Attributes:
        directory: has model.safetensors, or model.safetensors.index.json and the files listed in it.
    """

    directory: Path
    _headers: dict[str, _Header] = field(default_factory=dict)
    _used: int = 0  # bytes of the headers that were read

    @cached_property
    def names(self) -> Mapping[str, set[str]]:
        """The files, and the keys listed for each by the index. Like transformers, prefers the single file.

        Raises:
            ConfigError: there are other weights.
            CheckpointError: there are no weights, or the index is damaged.
        """
        check_safetensors(self.directory)
        if (self.directory / SINGLE).is_file():
            return {SINGLE: set()}
        return _read_index(self.directory)

    def tensors(self, name: str, number: int, stack: ExitStack) -> Mapping[str, StoredTensor]:
        """Open a file, which the stack closes, and return its tensors by their keys.

        Args:
            name: one of `names`.
            number: its place among them.
            stack: closes the file.

        Raises:
            OSError: the file is missing or damaged, has changed since its header was read, or the headers of all files
                are too long.
        """
        file = open_file(self.directory / name, stack, number)
        known = self._headers.get(name)
        if known is None:
            tensors, used = read_header(file, MAX_HEADER_BYTES - self._used)
            self._used += used
            self._headers[name] = _Header(file.state, tensors)
            return tensors
        if known.state != file.state:
            raise OSError(CHANGED)
        return {key: tensor._replace(file=file) for key, tensor in known.tensors.items()}


def _read_index(directory: Path) -> Mapping[str, set[str]]:
    """The keys of each file. The work grows with the number of keys, not with its product with that of files."""
    path = directory / INDEX
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(shown(directory), [f"{INDEX} has more than {MAX_INDEX_BYTES} bytes"])
    try:
        weight_map = json_value(path.read_text(encoding="utf-8"))["weight_map"]
        entries = [(key, str(name)) for key, name in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{INDEX}: weight_map cannot be read ({repr(error)[:200]})"
        raise CheckpointError(shown(directory), [problem]) from error
    names: dict[str, set[str]] = defaultdict(set)
    for key, name in entries:
        names[name].add(key)
    if len(entries) > MAX_TENSORS or len(names) > MAX_FILES:
        problem = (
            f"{INDEX}: it lists {len(entries)} tensors in {len(names)} files, and at most {MAX_TENSORS} in "
            f"{MAX_FILES} are read"
        )
        raise CheckpointError(shown(directory), [problem])
    outside = sorted(name for name in names if Path(name).name != name)
    if outside:  # an index must not refer to files in other folders
        raise CheckpointError(
            shown(directory),
            [f"{INDEX}: {name[:200]!r} is not a plain file name" for name in outside],
        )
    return dict(sorted(names.items()))
