"""New weights for a running executor: checked, read to the host, and put in place between two iterations.

Nothing is compiled. A tree in memory is copied parameter by parameter, so the devices hold one parameter twice at most.
A checkpoint is first read to the memory of the host.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from orca_jax.assembly.built import PutInPlace
from orca_jax.assembly.executor import PlacedModel
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.host import trim_heap
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.checkpoint import (
    ArrayOfTree,
    open_stored,
    save_leaves,
    views_of,
)
from orca_jax.model.files.digests import check_digests
from orca_jax.model.files.finite import NotFinite
from orca_jax.model.leaves.fill import fill
from orca_jax.model.lora.trees import side_of
from orca_jax.model.matrices.packed import plain_shape, values_of_host
from orca_jax.model.orbax_files import Keys, orbax_root, read_tree
from orca_jax.model.parameters import (
    first_line,
    flat_parameters,
    path_of,
    with_layers,
    with_parameters,
)
from orca_jax.model.trees.leaves import view_sources
from orca_jax.model.trees.mapping import TreeMapping, read_mapping
from orca_jax.model.trees.memory import (
    InMemory,
    check_readable,
    flat_tree,
    nested,
    stored_tree,
)
from orca_jax.model.trees.views import View
from orca_jax.values.errors import CheckpointError, ConfigError

REMEDY = "The weights in use are unchanged. Pass the tree of parameters of the served model (docs/rollouts.md)"

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Replaces the weights of an executor by those of a tree with the parameters of the same model.

    Args:
        placed: the model. Its tables map the keys of trees, as for checkpoints.
        executor: the executor of this model.
        directory: the directory of the model, for its mapping.json; empty for a preset.
    """

    def __init__(self, placed: PlacedModel, executor: JaxExecutor, directory: str) -> None:
        self._placed = placed
        self._executor = executor
        self._mapping: TreeMapping | None = read_mapping(Path(directory)) if directory else None

    @cached_property
    def _of_model(self) -> nnx.State:
        """The shapes of all parameters. It takes as long as tracing the constructor of the model."""
        return self._placed.weights.of_model(self._placed.mesh)

    def shapes(self) -> dict[str, Any]:
        """The shapes of all parameters in a tree, without padding, and how they are sharded."""
        flat: dict[Keys, Any] = {}
        for keys, variable in nnx.to_flat_state(self._of_model):
            found = plain_shape(variable)
            shape = found.shape
            if keys[-1] == "table":  # with rows for the devices
                shape = (min(shape[0], self._placed.config.vocab_size), *shape[1:])
            flat[tuple(map(str, keys))] = jax.ShapeDtypeStruct(
                shape, found.dtype, sharding=found.sharding
            )
        return nested(flat)

    def prepare(self, source: Any) -> PutInPlace:
        """Check new weights, and return the function that puts them in place.

        Args:
            source: a tree (a state of `flax.nnx`, a module, nested dicts), or the path of an Orbax checkpoint. It is
                in the format of the decoder, of MaxText, of Tunix, or of the model's mapping.json. The values are cast
                to the type of the weights.

        Raises:
            ConfigError: the weights have the bits of their files.
            CheckpointError: lists every missing, unexpected, misshapen and unreadable parameter, and those of other
                types. The weights in use are unchanged.
        """
        if self._placed.weights.keep_bits is not None and self._placed.library is not None:
            message = (
                "weights in the few bits of their files cannot be replaced: serve plain safetensors"
            )
            raise ConfigError(message, param="model")
        try:
            return partial(self._put, self._views(source))
        except CheckpointError as error:
            raise CheckpointError(error.source, error.problems, remedy=REMEDY) from None

    def _views(self, source: Any) -> Mapping[str, View]:
        """The values of each parameter, with all layers."""
        is_path = isinstance(source, str | PathLike)
        if is_path:
            root = Path(source).absolute()
            folder = orbax_root(root)
            if folder is None:
                problem = (
                    f"the path is not an Orbax checkpoint, and has no folder {PARAMS}/ with one"
                )
                raise CheckpointError(str(root), [problem])
            check_digests(root)
            tree = read_tree(folder)
            mapping = read_mapping(root) or self._mapping
            open_array: Callable[[Keys], ArrayOfTree] = partial(open_stored, tree)
        else:
            leaves = flat_tree(source)
            tree = stored_tree(leaves)
            mapping = self._mapping
            open_array = partial(_opened, leaves)
        views, problems = views_of(tree, open_array, self._of_model, self._placed.config, mapping)
        if is_path and not problems:
            views, problems = _read_all(views)
        if problems:
            raise CheckpointError(str(tree.folder), problems)
        return views

    def _put(self, views: Mapping[str, View], progress: Callable[[], None]) -> None:
        config = self._placed.config
        stacked = with_layers(self._of_model)
        not_finite = NotFinite()
        problems: list[str] = []
        own = [stage for stage in self._placed.stages if stage.is_local]
        for placed, stage in zip(own, self._executor.stages, strict=True):
            state = nnx.state(placed.shapes)
            paths = jax.tree.leaves(
                with_parameters(state, {path: path for path in flat_parameters(state)})
            )
            places = {path: index for index, path in enumerate(paths)}
            held = {path_of(keys): variable for keys, variable in nnx.to_flat_state(state)}
            shapes = {path: plain_shape(variable) for path, variable in held.items()}
            sources = view_sources(shapes, views, stacked, placed.shapes.span.start, config)
            for path, values in fill(shapes, sources, _no_progress, problems, not_finite):
                stage.put_weight(places[path], values_of_host(held[path], values))
                progress()
        if problems:  # arrays of the tree that were deleted after the check
            raise CheckpointError("the new weights", problems)
        not_finite.warn("the new weights")
        trim_heap()


def _no_progress(done: int, total: int) -> None:
    """Show nothing: the executor counts the weights that are in place."""


def save(params: Any, folder: Path) -> None:
    """Write a tree of parameters to `folder`/params with Orbax."""
    save_leaves(flat_tree(params), folder)


def split_adapters(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a tree without those of adapters, and those of adapters, as nested dicts."""
    leaves = flat_tree(params)
    found = {keys: leaf for keys, leaf in leaves.items() if side_of(keys)}
    rest = {keys: leaf for keys, leaf in leaves.items() if keys not in found}
    return nested(rest), nested(found)


def rank_of(params: Any) -> int:
    """The largest rank of the adapters of a tree; 0 without any."""
    largest = 0
    for keys, leaf in flat_tree(params).items():
        name = side_of(keys)
        if name is not None and name[1] == "b":
            largest = max(largest, leaf.shape[0])
    return largest


def _opened(leaves: Mapping[Keys, Any], keys: Keys) -> ArrayOfTree:
    array = leaves[keys]
    check_readable(array)
    return ArrayOfTree(InMemory(array), np.dtype(array.dtype).name)


def _read_all(views: Mapping[str, View]) -> tuple[dict[str, View], list[str]]:
    """The same views with their values in the memory of the host, and the problems of reading them."""
    held: dict[str, View] = {}
    problems: list[str] = []
    for path, view in views.items():
        try:
            held[path] = InMemory(view.start([range(size) for size in view.shape])())
        except Exception as error:  # TensorStore raises several kinds for broken files
            problems.append(f"{path}: cannot be read: {first_line(error)}")
    return held, problems
