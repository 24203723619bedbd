"""The table for a tree, chosen by its keys, and the arrays of each parameter."""

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from orca_jax.helpers.orbax_names import MAPPING, WRAPPERS
from orca_jax.model.orbax_files import SAVE_AGAIN, Keys, StoredTree
from orca_jax.model.trees import maxtext, tunix
from orca_jax.model.trees.mapping import TreeMapping
from orca_jax.model.trees.rows import LAYER, TreeRow, TreeTable
from orca_jax.values.checks import did_you_mean
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import CheckpointError

# keys of copies of a tree
_NOT_SERVED = frozenset({"opt_state", "optimizer", "optimizer_state", "mu", "nu", "opt"})
_SHARED = "final_norm.scale"  # a name in trees of Tunix's Gemmas, too
_SHOWN = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParameterArrays:
    """The arrays of a parameter: one, or one for each layer.

    Attributes:
        row: the row of the table.
        arrays: the stored keys of each array, by its name in messages.
        layer: the wanted layer of an array of all layers; None for all of them.
        is_own: True if the tree has the name of the parameter.
    """

    row: TreeRow
    arrays: Mapping[str, Keys]
    layer: int | None
    is_own: bool


@dataclass(frozen=True)
class PlacedTable:
    """A table, and the keys above the tree that it describes."""

    table: TreeTable
    prefix: Keys


def own_table(stacked: Mapping[str, bool]) -> TreeTable:
    """The table of a tree with the decoder's parameters. True marks parameters with the layers as first axis."""
    rows = (
        TreeRow(path.replace(".", "/"), path, (), 0 if of_layers else None)
        for path, of_layers in stacked.items()
    )
    return TreeTable("", tuple(rows))


def choose_table(
    tree: StoredTree, stacked: Mapping[str, bool], config: ModelConfig, mapping: TreeMapping | None
) -> PlacedTable:
    """The table for a tree: that of mapping.json, the decoder's own, MaxText's or Tunix's.

    Args:
        tree: the stored keys.
        stacked: the parameters of the decoder, as in `own_table`.
        config: the model.
        mapping: the mapping of the model directory.

    Raises:
        ConfigError: the table does not support the family.
        CheckpointError: no table fits. The error lists some keys.
    """
    mapping = mapping or TreeMapping()
    if mapping.rows is not None:
        sources = [tuple(row.source.replace(LAYER, "0").split("/")) for row in mapping.rows.rows]
        return _placed(tree, mapping.rows, tree.prefix(sources) or ())
    name = mapping.name
    known = [tuple(path.split(".")) for path in stacked if path != _SHARED]
    own = tree.prefix(known)
    if name is None and own is not None:
        return PlacedTable(own_table(stacked), own)
    for kind, anchor in {"maxtext": maxtext.ANCHOR, "tunix": tunix.ANCHOR}.items():
        prefix = _above(tree, anchor)
        if prefix is None or name not in (None, kind):
            continue
        if kind == "tunix":
            return _placed(tree, tunix.table(config), prefix)
        keys = {
            "/".join(_plain(keys[len(prefix) :]))
            for keys in tree.leaves
            if keys[: len(prefix)] == prefix
        }
        return _placed(tree, maxtext.table(config, keys, mapping.options), prefix)
    raise CheckpointError(
        str(tree.folder), [_unknown(tree, next(iter(stacked)), len(stacked))], remedy=SAVE_AGAIN
    )


def _placed(tree: StoredTree, table: TreeTable, prefix: Keys) -> PlacedTable:
    logger.info(
        "%s: parameters by the table of %s, from %s",
        tree.folder,
        table.name,
        "/".join(prefix) or "its top",
    )
    return PlacedTable(table, prefix)


def find_arrays(
    tree: StoredTree,
    placed: PlacedTable,
    stacked: Mapping[str, bool],
    shapes: Mapping[str, tuple[int, ...]],
    num_layers: int,
) -> tuple[dict[str, ParameterArrays], list[str]]:
    """The arrays of each parameter, and the problems of the table and of the tree. `shapes` are for messages."""
    table = placed.table
    prefix = placed.prefix
    if num_layers > len(tree.leaves) and any(LAYER in row.source for row in table.rows):
        return {}, [f"config.json: {num_layers} layers, but the tree has {len(tree.leaves)} arrays"]
    described: dict[str, ParameterArrays] = {}
    used: set[Keys] = set()
    for row in table.rows:
        described |= _of_row(row, tree, prefix, num_layers)
    sources: dict[str, ParameterArrays] = {}
    problems: list[str] = []
    for path, source in described.items():
        used.update(source.arrays.values())
        problem = _problem(path, source, tree, stacked)
        if problem is None:
            sources[path] = source
        else:
            problems.append(problem)
    problems += [
        f"{path} {list(shapes[path])}: no row has this parameter"
        for path in stacked
        if path not in described
    ]
    return sources, problems + _unexpected(tree, placed, used)


def _of_row(
    row: TreeRow, tree: StoredTree, prefix: Keys, num_layers: int
) -> dict[str, ParameterArrays]:
    """The arrays of each parameter of a row."""
    is_own = row.source.replace("/", ".") == row.path

    def find(layer: int | None) -> tuple[str, Keys]:
        name = row.source.replace(LAYER, str(layer))
        keys = tuple(name.split("/"))
        if is_own:
            name = row.path
        return name, tree.find(prefix, keys) or (*prefix, *keys)

    layers = range(num_layers)
    if LAYER in row.path:
        in_one = row.layer_axis is not None
        return {
            row.path.replace(LAYER, str(layer)): ParameterArrays(
                row, dict([find(layer)]), layer if in_one else None, is_own
            )
            for layer in layers
        }
    numbers: Iterable[int | None] = layers
    if LAYER not in row.source:
        numbers = (None,)
    found = dict(map(find, numbers))
    return {row.path: ParameterArrays(row, found, None, is_own)}


def _problem(
    path: str, source: ParameterArrays, tree: StoredTree, stacked: Mapping[str, bool]
) -> str | None:
    """The reason for which a parameter cannot have these arrays, before they are opened."""
    row = source.row
    if path not in stacked:
        return f"{path}: not a parameter of the model{did_you_mean(path, stacked)}"
    if stacked[path] and not row.has_layers:
        return f"{path}: has all layers; give {LAYER} in the source {row.source}, or layer_axis"
    if row.has_layers and not stacked[path] and LAYER not in row.path:
        return f"{path}: has no layers, but the source {row.source} has"
    missing = next((name for name, keys in source.arrays.items() if keys not in tree.leaves), None)
    if missing is None:
        return None
    return f"{missing}: missing"


def _unexpected(tree: StoredTree, placed: PlacedTable, used: Set[Keys]) -> list[str]:
    """The arrays beside those of the parameters that no row reads."""
    place = placed.prefix or _common(used)
    ignored = [tuple(key.strip("/").split("/")) for key in placed.table.ignored]
    skipped = {
        ".".join(keys[: max(1, len(place))]) for keys in tree.leaves if keys[: len(place)] != place
    }
    if skipped:
        beside = ", ".join(sorted(skipped)[:5])
        logger.info("%s of %s is served; not read: %s", ".".join(place), tree.folder, beside)
    inside = [keys for keys in tree.leaves if keys[: len(place)] == place and keys not in used]
    for key in ignored:
        inside = [keys for keys in inside if keys[: len(key)] != key]
    joint = "/" if placed.table.name else "."
    return [
        f"{joint.join(_plain(keys[len(placed.prefix) :]))}: unexpected{_advice(keys)}"
        for keys in inside
    ]


def _advice(keys: Keys) -> str:
    """The remedy for arrays of a known kind."""
    is_adapter = any("lora" in key.lower() for key in keys)
    return "; merge the adapter into the weights before saving" if is_adapter else ""


def _common(used: Set[Keys]) -> Keys:
    """The longest beginning of all keys."""
    if not used:
        return ()
    first = min(used)
    last = max(used)
    length = next(
        (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0
    )
    return first[:length]


def _above(tree: StoredTree, anchor: Keys) -> Keys | None:
    """The keys above `anchor`, those of the fewest keys. Optimiser state has copies of the tree."""
    found = [
        _plain(keys)[: -len(anchor)]
        for keys in tree.leaves
        if _plain(keys)[-len(anchor) :] == anchor
    ]
    served = [keys for keys in found if not _NOT_SERVED.intersection(keys)]
    return min(
        served, key=lambda keys: (len(keys), not set(keys) <= set(WRAPPERS), keys), default=None
    )


def _plain(keys: Keys) -> Keys:
    """The keys without the "value" of `flax.nnx`."""
    if keys[-1:] == ("value",):
        return keys[:-1]
    return keys


def _unknown(tree: StoredTree, wanted: str, number: int) -> str:
    """The problem of a tree for which there is no table. Another place of the parameters is named, if there is one."""
    first = tuple(wanted.split("."))
    for keys in tree.leaves:
        plain = _plain(keys)
        if plain[-len(first) :] == first:
            place = ".".join(plain[: -len(first)])
            return f"the parameters are under {place}, not under params: save that part of the tree alone"
    some = ", ".join(sorted("/".join(_plain(keys)) for keys in tree.leaves)[:_SHOWN]) or "nothing"
    return (
        f"{wanted}: missing, as all {number} parameters of the model; the tree has {some}. For another tree than this "
        f"decoder's, MaxText's or Tunix's, write {MAPPING} (docs/own_models.md)"
    )
