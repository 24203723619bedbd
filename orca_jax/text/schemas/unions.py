"""Tells whether at most one schema of a `oneOf` can match a value, so that a grammar may allow any of them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations, product
from typing import Any

from orca_jax.text.schemas.closed import target_of
from orca_jax.text.schemas.keywords import TYPES, kind_of

# of the comparisons of a document: schemas, parts, names and values that are read for them
MAX_STEPS = 50_000
MAX_CHOICES = 64  # of combined `anyOf`
MAX_LEVELS = 6  # of properties inside each other, and of references

_ALL = TYPES["number"].union(*TYPES.values())
_RANGES = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("integer", "minimum", "maximum"),
)

type Root = Mapping[str, Any]
type Conjunction = tuple[Mapping[str, Any], ...]  # schemas that all apply


class _TooManySteps(Exception):
    """The comparisons of a document exceed `MAX_STEPS`."""


class UnionCheck:
    """The comparisons of one document.

    Args:
        closed: the document with closed objects.
        written: the document without them.
    """

    def __init__(self, closed: Root, written: Root) -> None:
        self._closed = closed
        self._written = written
        self._num_steps = 0
        self._required_names: dict[int, frozenset[str]] = {}  # by the id of their schema
        self._kinds_of: dict[
            int, frozenset[str]
        ] = {}  # types of listed values, by the id of their schema
        # listed values as text, by the id of their schema
        self._texts: dict[int, frozenset[str]] = {}

    def is_exclusive(self, closed: Sequence[Any], written: Sequence[Any]) -> bool:
        """Return True if no value of a closed schema matches another one of the schemas as written.

        A value of a closed schema matches the written one of the same place. So it then matches exactly one. Unions
        that take too many steps are not exclusive.
        """
        if len(written) < 2:
            return True
        try:
            return self._is_exclusive(closed, written)
        except _TooManySteps:
            return False

    def _is_exclusive(self, closed: Sequence[Any], written: Sequence[Any]) -> bool:
        others = [self._choices(one, self._written) for one in written]
        if self._has_discriminator(others):
            return True
        mine = [self._choices(one, self._closed) for one in closed]
        pairs = permutations(range(len(mine)), 2)
        return all(self._are_apart(mine[one], others[other]) for one, other in pairs)

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise _TooManySteps

    def _has_discriminator(self, options: Sequence[Sequence[Conjunction]]) -> bool:
        """True if all values, or all values of a required property, differ: the usual case, without comparing pairs."""
        if not options or any([len(choices) != 1 for choices in options]):
            return False
        parts = [choices[0] for choices in options]
        if self._are_distinct(iter(parts)):
            return True
        if any([self._kinds(part) != {"object"} for part in parts]):
            return False
        required = [self._required_in(part) for part in parts]
        for name in _required(parts[0]):
            self._spend(len(required))
            if all(name in names for names in required) and self._are_distinct(
                _property_part(part, name) for part in parts
            ):
                return True
        return False

    def _required_in(self, part: Conjunction) -> frozenset[str]:
        """The required names of a part, those of a schema read once."""
        found: frozenset[str] = frozenset()
        for schema in part:
            if not schema.get("required"):
                continue
            names = self._required_names.get(id(schema))
            if names is None:
                names = frozenset(_list(schema, "required"))
                self._required_names[id(schema)] = names
            if found:
                self._spend(len(names))
                names |= found
            found = names  # without a copy of the first ones
        return found

    def _are_distinct(self, parts: Iterator[Conjunction]) -> bool:
        """True if the values of all parts are listed, and none is in two of them."""
        seen: set[str] = set()
        for part in parts:
            values = self._values(part)
            if values is None or not seen.isdisjoint(values):
                return False
            self._spend(1 + len(part))
            seen |= values
        return True

    def _are_apart(
        self, mine: Sequence[Conjunction], others: Sequence[Conjunction], level: int = 0
    ) -> bool:
        return all(self._is_apart(one, other, level) for one, other in product(mine, others))

    def _is_apart(self, one: Conjunction, other: Conjunction, level: int) -> bool:
        """True if no value can match both parts."""
        if level > MAX_LEVELS:
            return False
        self._spend(len(one) + len(other))
        kinds = self._kinds(one) & self._kinds(other)
        if not kinds:
            return True
        ours = self._values(one)
        theirs = self._values(other)
        if ours is not None and theirs is not None:
            self._spend(min(len(ours), len(theirs)))
            if ours.isdisjoint(theirs):
                return True
        for kind, least, most in _RANGES:
            if kinds <= TYPES["number" if kind == "integer" else kind]:
                return _bound(one, least) > _bound(other, most) or _bound(other, least) > _bound(
                    one, most
                )
        if kinds != {"object"}:
            return False
        names = dict.fromkeys([*_required(one), *_required(other)])
        self._spend(len(names))
        return any(self._differ(one, other, name, level) for name in names)

    def _differ(self, one: Conjunction, other: Conjunction, name: str, level: int) -> bool:
        """True if no value of a property can match both parts."""
        ours = _property(one, name)
        theirs = _property(other, name)
        if ours is None or theirs is None:
            return True
        if not ours or not theirs:
            return False
        return self._are_apart(
            self._choices({"allOf": ours}, self._closed),
            self._choices({"allOf": theirs}, self._written),
            level + 1,
        )

    def _choices(self, schema: Any, root: Root, level: int = 0) -> list[Conjunction]:
        """The parts of which one matches each value of a schema. They may match more."""
        if not isinstance(schema, Mapping):
            if schema is False:
                return []
            return [()]
        if level > MAX_LEVELS:
            return [()]
        self._spend(1)
        found: list[Conjunction] = [(schema,)]
        more = [(one,) for one in _list(schema, "allOf")]
        more += [tuple(_list(schema, key)) for key in ("anyOf", "oneOf") if key in schema]
        if isinstance(ref := schema.get("$ref"), str):
            more.append((target_of(root, ref),))
        for options in more:
            choices: list[Conjunction] = []
            for option in options:
                choices += self._choices(option, root, level + 1)
            if len(found) * len(choices) <= MAX_CHOICES:
                found = [(*one, *choice) for one, choice in product(found, choices)]
                self._spend(sum([len(one) for one in found]))
        return found

    def _kinds(self, part: Conjunction) -> frozenset[str]:
        """The types of the values that match, as `TYPES` has them."""
        kinds = _ALL
        for schema in part:
            if "type" in schema:
                names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
                kinds &= frozenset().union(*[TYPES.get(name, _ALL) for name in names])
            if _listed(schema) is not None:
                kinds &= self._listed_kinds(schema)
        return kinds

    def _listed_kinds(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """The types of the listed values of a schema of the document, read once."""
        kinds = self._kinds_of.get(id(schema))
        if kinds is None:
            kinds = frozenset([kind_of(value) for value in _listed(schema) or ()])
            self._kinds_of[id(schema)] = kinds
        return kinds

    def _values(self, part: Conjunction) -> frozenset[str] | None:
        """All values that match, as text; None if they are not listed."""
        found: frozenset[str] | None = None
        for schema in part:
            if _listed(schema) is not None:
                texts = self._texts_of(schema)
                if found is not None:
                    texts &= found
                found = texts
        return found

    def _texts_of(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """The listed values of a schema of the document, written once."""
        texts = self._texts.get(id(schema))
        if texts is None:
            texts = frozenset(
                [json.dumps(value, sort_keys=True) for value in _listed(schema) or ()]
            )
            self._texts[id(schema)] = texts
        return texts


def _property_part(part: Conjunction, name: str) -> Conjunction:
    """The schemas of a property, as far as they are objects."""
    return tuple([one for one in _property(part, name) or () if isinstance(one, Mapping)])


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _required(part: Conjunction) -> list[str]:
    return [*chain.from_iterable(_list(schema, "required") for schema in part)]


def _property(part: Conjunction, name: str) -> list[Any] | None:
    """The schemas of a property; None if the property is not allowed. There may be more of them."""
    found = []
    for schema in part:
        properties = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif not schema.get("patternProperties"):
            if other is False:
                return None
            found.append(other)
    if False in [one for one in found if isinstance(one, bool)]:
        return None
    return [one for one in found if one is not True]


def _bound(part: Conjunction, key: str) -> float:
    """The strictest bound of a part."""
    bounds = [schema[key] for schema in part if isinstance(schema.get(key), int | float)]
    if key.startswith("min"):
        return max(bounds, default=-math.inf)
    return min(bounds, default=math.inf)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key, ())
    if isinstance(value, list):
        return list(value)
    return []
