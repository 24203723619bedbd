"""Closes the objects of a JSON schema: an object with `properties` has no others unless the schema says so.

JSON Schema leaves objects open, and a model may then invent names until its limit. Callers mean the listed names. So a
schema with `properties` and without `additionalProperties` gets false for the latter, as in llama.cpp and xgrammar.

Parts for the same object (`allOf`, `anyOf`, `oneOf`, `$ref`, and the schema around them) are closed together: each of
them allows the names of all. If one of them sets `additionalProperties` to anything but false, all stay open.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from orca_jax.text.schemas.keywords import LISTS, MAPS, SINGLE, NameBudget, SchemaTooLargeError
from orca_jax.values.checks import whole_number

_SCHEMAS = (*SINGLE, "contains", "prefixItems")  # a schema, or a list of them


class OpenUnion(NamedTuple):
    """A `oneOf` in a schema: the closed schema around it, and its own list of open schemas."""

    around: dict[str, Any]
    options: list[Any]


class _Names(NamedTuple):
    """The allowed names of an object. `patterns` are those of `patternProperties`."""

    properties: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    is_open: bool = False


_NONE = _Names()


def closed(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[OpenUnion]]:
    """Return the schema with closed objects, and each `oneOf` in it.

    Raises:
        SchemaTooLargeError: parts of the schema have too many names together, or refer to each other too deeply.
    """
    closer = _Closer(schema)
    try:
        return closer.run(), closer.unions
    except RecursionError:
        raise SchemaTooLargeError("its parts refer to each other too deeply") from None


class _Closer:
    """Closes one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.unions: list[OpenUnion] = []
        self._root = root
        # reference and outer names -> key of `_added`
        self._copies: dict[tuple[str, _Names], str] = {}
        self._added: dict[str, Any] = {}  # definitions closed together with outer names
        self._known: dict[int, _Names] = {}  # by the id of a schema
        self._spend = NameBudget().spend
        self._numbers = itertools.count()  # of the copies' names

    def run(self) -> dict[str, Any]:
        found: dict[str, Any] = self._close(self._root, _NONE)
        if self._added:
            found["$defs"] = {**found.get("$defs", {}), **self._added}
        return found

    def _close(self, schema: Any, outer: _Names) -> Any:
        """The schema, closed. `outer` are the names of other parts of the same object."""
        if not isinstance(schema, Mapping):
            return schema
        made = {key: self._inner(key, value) for key, value in schema.items()}
        parts = list(_parts(schema))
        own = _own_names(schema)
        if own == _NONE and len(parts) == 1 and "properties" not in schema:
            total = outer
            rests = [outer]
        else:
            total, rests = self._shares(
                outer, own, [self._union(schemas) for _, _, schemas in parts]
            )
        for (key, index, schemas), rest in zip(parts, rests, strict=True):
            if key == "$ref":
                made[key] = self._reference(schema[key], rest)
            else:
                made[key][index] = [self._close(one, rest) for one in schemas]
                if key == "oneOf":
                    self.unions.append(OpenUnion(made, schema[key]))
        if (
            isinstance(schema.get("properties"), Mapping)
            and "additionalProperties" not in schema
            and not total.is_open
        ):
            self._shut(made, total)
        return made

    def _inner(self, key: str, value: Any) -> Any:
        """The value of a keyword, with closed schemas. Those of `_parts` are only copied."""
        if key in MAPS and isinstance(value, Mapping):
            return {name: self._close(one, _NONE) for name, one in value.items()}
        if key in _SCHEMAS:
            if isinstance(value, list):
                return [self._close(one, _NONE) for one in value]
            return self._close(value, _NONE)
        if key in LISTS and isinstance(value, list):
            return list(value)
        return value

    def _shut(self, made: dict[str, Any], total: _Names) -> None:
        """Allow the names of all parts, and no others."""
        self._spend(len(total.properties) + len(total.patterns))
        for key, names in (("properties", total.properties), ("patternProperties", total.patterns)):
            if missing := sorted(names - made.get(key, {}).keys()):
                made[key] = {**made.get(key, {}), **{name: {} for name in missing}}
        made["additionalProperties"] = False

    def _reference(self, ref: str, outer: _Names) -> str:
        """The reference to the same schema, closed together with `outer`."""
        target = target_of(self._root, ref)
        if outer == _NONE or target is None:
            return ref
        key = self._copies.get((ref, outer))
        if key is None:
            taken = self._root.get("$defs", ())
            key = next(
                name for number in self._numbers if (name := f"closed-{number}") not in taken
            )
            self._copies[ref, outer] = key  # first, for schemas that refer to themselves
            self._added[key] = {}
            self._added[key] = self._close(target, outer)
        return f"#/$defs/{key}"

    def _names(self, schema: Any) -> _Names:
        """The allowed names of a schema, those of its parts included."""
        if not isinstance(schema, Mapping):
            return _NONE
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = _NONE  # for schemas that refer to themselves
            parts = [self._union(schemas) for _, _, schemas in _parts(schema)]
            known, _ = self._shares(_NONE, _own_names(schema), parts)
            self._known[id(schema)] = known
        return known

    def _union(self, schemas: Sequence[Any]) -> _Names:
        """The allowed names of several schemas together. A text is a reference."""
        total = _NONE
        for schema in schemas:
            if isinstance(schema, str):
                target = target_of(self._root, schema)
                names = _Names(is_open=True) if target is None else self._names(target)
            else:
                names = self._names(schema)
            self._spend(len(names.properties) + len(names.patterns))
            total = _Names(
                total.properties | names.properties,
                total.patterns | names.patterns,
                total.is_open or names.is_open,
            )
        return total

    def _shares(
        self, outer: _Names, own: _Names, parts: Sequence[_Names]
    ) -> tuple[_Names, list[_Names]]:
        """The names of all, and for each part the names of all others."""
        every = (outer, own, *parts)
        properties = Counter(chain.from_iterable(one.properties for one in every))
        patterns = Counter(chain.from_iterable(one.patterns for one in every))
        num_open = sum(one.is_open for one in every)
        self._spend((len(properties) + len(patterns)) * len(parts))
        rests = []
        for one in parts:
            in_others = _beside(properties, one.properties), _beside(patterns, one.patterns)
            rests.append(_Names(*in_others, num_open > one.is_open))
        return _Names(frozenset(properties), frozenset(patterns), num_open > 0), rests


def _beside(counts: Counter[str], own: frozenset[str]) -> frozenset[str]:
    """The names that others than one part have, from the counts of all."""
    return frozenset(name for name, count in counts.items() if count > (name in own))


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, slice, Sequence[Any]]]:
    """The keyword, place and schemas of each part for the same value. Of several schemas, one applies."""
    for key in LISTS:
        value = schema.get(key)
        if isinstance(value, list):
            if key == "allOf":
                yield from (
                    (key, slice(index, index + 1), [one]) for index, one in enumerate(value)
                )
            else:
                yield key, slice(None), value
    if isinstance(schema.get("$ref"), str):
        yield "$ref", slice(None), [schema["$ref"]]


def _own_names(schema: Mapping[str, Any]) -> _Names:
    """The names in a schema itself, without its parts."""
    names: set[str] = set()
    patterns: frozenset[str] = frozenset()
    if isinstance(listed := schema.get("required"), list):
        names.update(name for name in listed if isinstance(name, str))
    if isinstance(properties := schema.get("properties"), Mapping):
        names.update(properties)
    if isinstance(of_patterns := schema.get("patternProperties"), Mapping):
        patterns = frozenset(of_patterns)
    return _Names(
        frozenset(names),
        patterns,
        schema.get("additionalProperties", False) is not False or "unevaluatedProperties" in schema,
    )


def target_of(root: Mapping[str, Any], ref: str) -> Any:
    """Return the schema of a reference within the document, or None."""
    found: Any = root
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif (
            isinstance(found, list)
            and (index := whole_number(key)) is not None
            and index < len(found)
        ):
            found = found[index]
        else:
            return None
    return found if ref.split("/")[0] == "#" else None
