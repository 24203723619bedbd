"""The folders and the tree of an Orbax checkpoint, found and checked before an array is opened.

Orbax writes a tree in three layouts, and all of them are read:

- the tree itself: a folder with `_METADATA`;
- a checkpoint of named trees, or of Orbax v1: folders with `_METADATA` in one folder;
- a `CheckpointManager`: a folder with one such checkpoint per step, named by its number.

Checkpoints come from strangers, so files, leaves and depths have limits.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from orca_jax.helpers.buckets.views import shown
from orca_jax.helpers.orbax_names import (
    COMMITTED,
    MANIFEST,
    MARKS,
    METADATA,
    PARAMS,
    TREE_FOLDERS,
    WRAPPERS,
)
from orca_jax.values.checks import json_value
from orca_jax.values.errors import CheckpointError

SAVE_AGAIN = (
    "Save the parameters alone with orca_jax.model.checkpoint.save_decoder, or convert a Hugging Face directory: "
    "orca-jax convert --model SOURCE --output DIR"
)
CONVERT_AGAIN = (
    "Copy the config.json that orca-jax convert wrote beside the checkpoint, or convert again"
)
LINK = "To serve another one, make params a link to its folder: ln -sfn FOLDER MODEL/params"

MAX_METADATA_BYTES = 64 * 2**20
MAX_LEAVES = 100_000  # of a tree, with optimiser state; a decoder has about 20
MAX_DEPTH = 64  # keys of one leaf
MAX_FILES = 200_000  # of the folders of a tree
MAX_ENTRIES = 20_000  # of a folder of steps

_STEP = re.compile(r"(?:.*_)?(\d{1,18})")
_UNFINISHED = ".orbax-checkpoint-tmp"

logger = logging.getLogger(__name__)

Keys = tuple[str, ...]


@dataclass(frozen=True)
class StoredTree:
    """The contents of `_METADATA`: the kind of each leaf by its keys, and the format of the arrays in `folder`."""

    folder: Path
    leaves: Mapping[Keys, str]
    is_ocdbt: bool
    is_zarr3: bool
    has_all_chunks: bool

    def prefix(self, wanted: Sequence[Keys]) -> Keys | None:
        """The keys above the parameters `wanted`, such as ("params",) beside "opt_state"; None if they are not found.

        Known names are tried only, since an optimiser's moments have the same keys as the parameters.
        """
        for depth in range(3):
            for prefix in product(WRAPPERS, repeat=depth):
                if any(self.find(prefix, keys) for keys in wanted):
                    return prefix
        return None

    def find(self, prefix: Keys, keys: Keys) -> Keys | None:
        """The full keys of a parameter. States of `flax.nnx` end in "value"."""
        full = (*prefix, *keys)
        if full in self.leaves:
            return full
        of_state = (*full, "value")
        if of_state in self.leaves:
            return of_state
        return None


def orbax_root(directory: Path) -> Path | None:
    """The folder of the Orbax checkpoint of a model directory: params/, or the directory itself; None without one."""
    if (directory / PARAMS).is_dir():
        return directory / PARAMS
    return directory if is_checkpoint(directory) else None


def is_checkpoint(folder: Path) -> bool:
    """True if Orbax wrote `folder`: a tree, a checkpoint of several trees, or the steps of a `CheckpointManager`."""
    return any((folder / mark).is_file() for mark in MARKS) or (
        folder.is_dir() and bool(_steps(folder))
    )


def read_tree(root: Path) -> StoredTree:
    """Find the tree of the checkpoint `root`, and read its metadata. The latest step is taken if there are several.

    Raises:
        CheckpointError: there is no complete tree, there are several, or one of the limits is exceeded.
    """
    folder = _tree_folder(root)
    _check_files(folder)
    metadata = _read_metadata(folder)
    leaves: dict[Keys, str] = {}
    for entry in _entries(metadata, folder):
        keys = entry["key_metadata"]
        value = entry["value_metadata"]
        if len(keys) > MAX_DEPTH:
            raise _refused(folder, f"{METADATA}: a leaf has more than {MAX_DEPTH} keys")
        if not value.get("skip_deserialize"):  # else an empty node
            leaves[tuple(str(key["key"]) for key in keys)] = str(value.get("value_type"))
    is_ocdbt = metadata.get("use_ocdbt")
    return StoredTree(
        folder,
        leaves,
        is_ocdbt=(folder / MANIFEST).is_file() if is_ocdbt is None else bool(is_ocdbt),
        is_zarr3=bool(metadata.get("use_zarr3")),
        has_all_chunks=bool(metadata.get("store_array_data_equal_to_fill_value")),
    )


def _tree_folder(root: Path) -> Path:
    """The folder of the tree in `root` or in its latest complete step. Incomplete steps are logged."""
    if (tree := _tree_in(root)) is not None:
        return tree
    found = _steps(root)
    if not found:
        raise _refused(root, _reason(root))
    steps = _complete(found)
    for step in sorted(found.keys() - steps.keys()):
        logger.warning(
            "step %d of %s is ignored: it has no %s, so it is incomplete", step, root, COMMITTED
        )
    latest = max(steps)
    known = ", ".join(map(str, sorted(steps)[-5:]))
    logger.info("step %d of %s is served, the latest of %s. %s", latest, root, known, LINK)
    if (tree := _tree_in(steps[latest])) is None:
        raise _refused(steps[latest], _reason(steps[latest]))
    return tree


def _tree_in(folder: Path) -> Path | None:
    """The tree of a checkpoint: the folder itself or one in it; None without one. Raises CheckpointError."""
    if (folder / METADATA).is_file():
        return folder
    trees = [path for path in _folders(folder) if (path / METADATA).is_file()]
    if not trees:
        return None
    return _one_of(trees, folder)


def _one_of(trees: Sequence[Path], root: Path) -> Path:
    """The tree with one of the usual names, or the only one."""
    by_name = {path.name: path for path in trees}
    known = [by_name[name] for name in TREE_FOLDERS if name in by_name]
    if not known and len(trees) > 1:
        names = ", ".join(sorted(by_name)[:10])
        raise CheckpointError(str(root), [f"it holds several trees: {names}"], remedy=LINK)
    if known:
        return known[0]
    return trees[0]


def _steps(root: Path) -> dict[int, Path]:
    """The steps of a `CheckpointManager`, incomplete ones included."""
    found = {}
    marks = (*MARKS, *(f"{name}/{METADATA}" for name in TREE_FOLDERS))
    for path in _folders(root):
        match = _STEP.fullmatch(path.name)
        if match and any((path / mark).is_file() for mark in marks):
            found[int(match[1])] = path
    return found


def _complete(steps: Mapping[int, Path]) -> Mapping[int, Path]:
    """The complete ones of some steps.

    Orbax names a step only when it is complete, or marks it with a file. If some steps have the mark, then the others
    are incomplete.
    """
    marked = {step: path for step, path in steps.items() if (path / COMMITTED).is_file()}
    return marked or steps


def _folders(root: Path) -> list[Path]:
    paths = [Path(entry.path) for entry in _scan(root, MAX_ENTRIES)]
    return [path for path in paths if path.is_dir()]


def _scan(folder: Path, limit: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = list(islice(entries, limit + 1))
    except OSError as error:
        raise _refused(folder, f"the folder cannot be read: {error.strerror}") from None
    if len(found) > limit:
        raise _refused(folder, f"the folder has more than {limit} entries")
    return found


def _reason(folder: Path) -> str:
    """The reason for which a folder is not a checkpoint."""
    if _UNFINISHED in folder.name or any(_UNFINISHED in path.name for path in _folders(folder)):
        return "the checkpoint was not written to its end, so it has no metadata: save it again"
    if (folder / COMMITTED).is_file():
        return f"{METADATA} is missing, although {COMMITTED} is there: copy the whole folder again"
    if (folder / "checkpoint").is_file():
        return f"it has a checkpoint in msgpack of an old Flax or Orbax, and no {METADATA}"
    return f"not a complete Orbax checkpoint: {METADATA} is missing"


def _refused(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(shown(folder), [problem], remedy=SAVE_AGAIN)


def _check_files(folder: Path) -> None:
    """Check the number of files, and that none is a pipe or a device, since reading these may never end."""
    pending = [folder]
    seen = {folder.resolve()}
    count = 0
    while pending:
        for entry in _scan(pending.pop(), MAX_FILES):
            path = Path(entry.path)
            count += 1
            if count > MAX_FILES:
                raise _refused(folder, f"the checkpoint has more than {MAX_FILES} files")
            if path.is_file():
                continue
            if not path.is_dir():
                raise _refused(folder, f"{entry.name} is not a regular file")
            if path.resolve() not in seen:  # a link may lead to a folder above it
                seen.add(path.resolve())
                pending.append(path)


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise _refused(folder, f"{METADATA} has more than {MAX_METADATA_BYTES} bytes")
    try:
        metadata = json_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(folder, f"{METADATA} cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(metadata, dict):
        raise _refused(folder, f"{METADATA} must hold a JSON object")
    return metadata


def _entries(metadata: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The descriptions of the leaves, with their types checked."""
    entries = metadata.get("tree_metadata")
    if isinstance(entries, dict) and len(entries) > MAX_LEAVES:
        raise _refused(
            folder,
            f"{METADATA}: the tree has {len(entries)} leaves, and at most {MAX_LEAVES} are read",
        )
    if not isinstance(entries, dict) or not all(map(_is_leaf, entries.values())):
        raise _refused(folder, f"{METADATA}: tree_metadata is not a description of a tree")
    return list(entries.values())


def _is_leaf(entry: object) -> bool:
    if not (isinstance(entry, dict) and isinstance(entry.get("value_metadata"), dict)):
        return False
    keys = entry.get("key_metadata")
    return isinstance(keys, list) and all(isinstance(key, dict) and "key" in key for key in keys)
