"""References of a JSON schema: the places that they name, and how deep they lead."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from orca_jax.text.schemas.keywords import (
    ANNOTATIONS,
    LISTS,
    MAPS,
    SINGLE,
    UnenforceableError,
    WrongSchemaError,
)
from orca_jax.values.checks import whole_number

MAX_DEPTH = 512  # schemas inside each other, along references that lead from one to the next
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")

type Path = tuple[str, ...]


class SchemaPlace(NamedTuple):
    """A schema of a document. An empty path is that of the whole document."""

    path: Path
    schema: Any


class References:
    """The references of one document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._found: dict[str, SchemaPlace] = {}
        self._anchors: dict[str, SchemaPlace] | None = None
        # a schema inside has an `$id`, and references mean other places in it
        self._has_parts = False

    def find(self, ref: object) -> SchemaPlace:
        """Return the place of a reference, at the end of a chain of references alone.

        Raises:
            WrongSchemaError: it leads nowhere, or in a circle.
            UnenforceableError: it leads to another document.
        """
        if not isinstance(ref, str):
            raise WrongSchemaError("must be a string")
        chain: dict[str, None] = {}
        while ref not in self._found:
            place = self._place(ref)
            follows = _reference_alone(place.schema)
            if follows is None:
                self._found[ref] = place
                break
            if ref in chain:
                raise WrongSchemaError(f"no text can match it: {ref[:100]!r} leads to itself")
            chain[ref] = None
            ref = follows
        found = self._found[ref]
        self._found.update(dict.fromkeys(chain, found))
        return found

    def _place(self, ref: str) -> SchemaPlace:
        if self._anchors is None:
            self._anchors = self._read_anchors()
        inner = ref
        if isinstance(own := self._root.get("$id"), str):
            inner = ref.removeprefix(own.partition("#")[0])
        if self._has_parts or not (inner.startswith("#") or (inner != ref and not inner)):
            raise UnenforceableError("it leads out of the schema")
        pointer = unquote(inner[1:])
        if pointer and not pointer.startswith("/"):
            if pointer in self._anchors:
                return self._anchors[pointer]
            raise WrongSchemaError(f"{ref[:100]!r} leads nowhere")
        path = tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
        found: Any = self._root
        for key in path:
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif (
                isinstance(found, list)
                and (index := whole_number(key)) is not None
                and index < len(found)
            ):
                found = found[index]
            else:
                raise WrongSchemaError(f"{ref[:100]!r} leads nowhere")
        return SchemaPlace(path, found)

    def _read_anchors(self) -> dict[str, SchemaPlace]:
        anchors: dict[str, SchemaPlace] = {}
        pending = [SchemaPlace((), self._root)]
        while pending:
            place = pending.pop()
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := place.schema.get(key), str):
                    anchors[name] = place
            for key in ("$id", "id"):
                name = place.schema.get(key)
                if not place.path or not isinstance(name, str):
                    continue
                if name.startswith("#"):  # an anchor in older drafts
                    anchors[name[1:]] = place
                else:
                    self._has_parts = True
            pending += [
                SchemaPlace((*place.path, *path), schema) for path, schema in _inner(place.schema)
            ]
        return anchors


def safe_name(path: Path) -> str:
    """Return a name of letters, digits, "_" and "-" for a place."""
    return _NOT_IN_NAMES.sub("_", path[-1] if path else "root")[:64]


def check_depth(root: Mapping[str, Any]) -> None:
    """Refuse a schema whose references lead too deep: the library calls itself for each of them.

    Args:
        root: a schema with all definitions in its `$defs`, and with references to them and to itself alone.

    Raises:
        WrongSchemaError: a chain of references, which may begin anywhere in a circle, is too deep.
    """
    units: dict[str, Any] = {f"#/$defs/{name}": one for name, one in root.get("$defs", {}).items()}
    units["#"] = {key: value for key, value in root.items() if key != "$defs"}
    edges: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, unit in units.items():
        refs: list[str] = []
        sizes[name] = _levels(unit, refs)
        edges[name] = [ref for ref in dict.fromkeys(refs) if ref in units]
    depths: dict[str, int] = {}  # of complete circles, and of all that they lead to
    for circle in _circles(edges):  # those that others lead to come first
        below = set().union(*[edges[name] for name in circle]) - set(circle)
        depth = sum([sizes[name] for name in circle])
        depth += max([depths[ref] for ref in below], default=0)
        if depth > MAX_DEPTH:
            raise WrongSchemaError(f"its references lead more than {MAX_DEPTH} levels deep")
        depths.update(dict.fromkeys(circle, depth))


def _circles(edges: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected parts of a graph, each after those that it leads to. Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    open_names: set[str] = set()
    top = ""  # leads to all others, and is in no circle
    pending = [(top, iter(edges))]
    while pending:
        name, rest = pending[-1]
        if name not in number:
            number[name] = lowest[name] = len(number)
            path.append(name)
            open_names.add(name)
        for ref in rest:
            if ref not in number:
                pending.append((ref, iter(edges[ref])))
                break
            if ref in open_names:
                lowest[name] = min(lowest[name], number[ref])
        else:
            pending.pop()
            if name == top:
                return
            above = pending[-1][0]
            lowest[above] = min(lowest[above], lowest[name])
            if lowest[name] == number[name]:
                yield _taken_from(path, name, open_names)


def _taken_from(path: list[str], name: str, open_names: set[str]) -> list[str]:
    """Take the end of a path from a name on, and return it in any order."""
    taken = [path.pop()]
    while taken[-1] != name:
        taken.append(path.pop())
    open_names.difference_update(taken)
    return taken


def _levels(schema: Any, refs: list[str]) -> int:
    """Return how many schemas are inside each other, and add their references to `refs`."""
    if isinstance(schema, list):
        return max([_levels(one, refs) for one in schema], default=0)
    if not isinstance(schema, Mapping):
        return 0
    if isinstance(ref := schema.get("$ref"), str):
        refs.append(ref)
    return 1 + max([_levels(one, refs) for one in schema.values()], default=0)


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the schemas of all keywords, with their paths."""
    for key, value in schema.items():
        if isinstance(value, Mapping):
            if key in MAPS or key == "dependentSchemas":
                yield from (
                    ((key, name), one) for name, one in value.items() if isinstance(one, Mapping)
                )
            elif key in SINGLE or key in ("contains", "not", "if", "then", "else", "propertyNames"):
                yield (key,), value
        elif isinstance(value, list) and key in (*LISTS, "items", "prefixItems"):
            yield from (
                ((key, str(at)), one) for at, one in enumerate(value) if isinstance(one, Mapping)
            )


def _reference_alone(schema: Any) -> str | None:
    """Return the reference of a schema that has nothing else."""
    if not isinstance(schema, Mapping) or not isinstance(ref := schema.get("$ref"), str):
        return None
    return ref if all([key == "$ref" or key in ANNOTATIONS for key in schema]) else None
