"""Tells whether at most one schema of a `oneOf` can match a value, so that a grammar may allow any of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orca_jax.text.schemas.closed import target_of
from orca_jax.text.schemas.keywords import TYPES, kind_of

MAX_STEPS = 100_000  # comparisons and schemas read for them, for all unions of a document
MAX_CHOICES = 64  # of combined `anyOf`
MAX_LEVELS = 6  # of properties inside each other, and of references

_ALL = TYPES["number"].union(*TYPES.values())
_RANGES = (("string", "minLength", "maxLength"), ("array", "minItems", "maxItems"), ("integer", "minimum", "maximum"))

type Root = Mapping[str, Any]
type Conjunction = tuple[Mapping[str, Any], ...]  # schemas that all apply


class UnionCheck:
    """The comparisons of one document.

    Args:
        closed: the document with closed objects.
        given: the document without them.
    """

    def __init__(self, closed: Root, given: Root) -> None:
        self._closed = closed
        self._given = given
        self._num_steps = 0

    def is_exclusive(self, closed: Sequence[Any], given: Sequence[Any]) -> bool:
        """Return True if no value of a closed schema matches another one of the given schemas.

        A value of a closed schema matches the given one of the same place. So it then matches exactly one.
        """
        if len(given) < 2 or _has_discriminator([self._choices(one, self._given) for one in given]):
            return True
        mine = [self._choices(one, self._closed) for one in closed]
        others = [self._choices(one, self._given) for one in given]
        return all(
            self._are_apart(mine[one], others[other])
            for one in range(len(mine))
            for other in range(len(others))
            if one != other
        )

    def _are_apart(self, mine: Sequence[Conjunction], others: Sequence[Conjunction], level: int = 0) -> bool:
        return all(self._is_apart(one, other, level) for one in mine for other in others)

    def _is_apart(self, one: Conjunction, other: Conjunction, level: int) -> bool:
        """True if no value can match both parts."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS or level > MAX_LEVELS:
            return False
        kinds = _kinds(one) & _kinds(other)
        if not kinds:
            return True
        ours, theirs = _values(one), _values(other)
        if ours is not None and theirs is not None and not ours & theirs:
            return True
        for kind, least, most in _RANGES:
            if kinds <= TYPES["number" if kind == "integer" else kind]:
                return _bound(one, least) > _bound(other, most) or _bound(other, least) > _bound(one, most)
        return kinds == {"object"} and any(
            self._differ(one, other, name, level) for name in dict.fromkeys([*_required(one), *_required(other)])
        )

    def _differ(self, one: Conjunction, other: Conjunction, name: str, level: int) -> bool:
        """True if no value of a property can match both parts."""
        ours, theirs = _property(one, name), _property(other, name)
        if ours is None or theirs is None:
            return True
        if not ours or not theirs:
            return False
        return self._are_apart(
            self._choices({"allOf": ours}, self._closed), self._choices({"allOf": theirs}, self._given), level + 1
        )

    def _choices(self, schema: Any, root: Root, level: int = 0) -> list[Conjunction]:
        """The parts of which one matches each value of a schema. They may match more."""
        if not isinstance(schema, Mapping):
            return [] if schema is False else [()]
        self._num_steps += 1
        if level > MAX_LEVELS or self._num_steps > MAX_STEPS:
            return [()]
        found: list[Conjunction] = [(schema,)]
        more = [(one,) for one in _list(schema, "allOf")]
        more += [tuple(_list(schema, key)) for key in ("anyOf", "oneOf") if key in schema]
        if isinstance(ref := schema.get("$ref"), str):
            more.append((target_of(root, ref),))
        for options in more:
            choices = [choice for option in options for choice in self._choices(option, root, level + 1)]
            if len(found) * len(choices) <= MAX_CHOICES:
                found = [(*one, *choice) for one in found for choice in choices]
        return found


def _has_discriminator(options: Sequence[Sequence[Conjunction]]) -> bool:
    """True if a required property has other values in each schema: the usual case, without comparing all pairs."""
    if not options or any([len(choices) != 1 for choices in options]):
        return False
    parts = [choices[0] for choices in options]
    if any([_kinds(part) != {"object"} for part in parts]):
        return False
    for name in _required(parts[0]):
        values = [
            _values(tuple(one for one in _property(part, name) or () if isinstance(one, Mapping)))
            if name in _required(part)
            else None
            for part in parts
        ]
        known = [one for one in values if one is not None]
        if len(known) == len(parts) and len(frozenset().union(*known)) == sum(map(len, known)):
            return True
    return False


def _kinds(part: Conjunction) -> frozenset[str]:
    """The types of the values that match, as `TYPES` has them."""
    kinds = _ALL
    for schema in part:
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            kinds &= frozenset().union(*[TYPES.get(name, _ALL) for name in names])
        if (values := _listed(schema)) is not None:
            kinds &= {kind_of(value) for value in values}
    return kinds


def _values(part: Conjunction) -> frozenset[str] | None:
    """All values that match, as text; None if they are not listed."""
    found: frozenset[str] | None = None
    for schema in part:
        if (values := _listed(schema)) is not None:
            texts = frozenset([json.dumps(value, sort_keys=True) for value in values])
            found = texts if found is None else found & texts
    return found


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _required(part: Conjunction) -> list[str]:
    return [name for schema in part for name in _list(schema, "required")]


def _property(part: Conjunction, name: str) -> list[Any] | None:
    """The schemas of a property; None if the property is not allowed. There may be more of them."""
    found = []
    for schema in part:
        properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif not schema.get("patternProperties"):
            if other is False:
                return None
            found.append(other)
    return (
        None if False in [one for one in found if isinstance(one, bool)] else [one for one in found if one is not True]
    )


def _bound(part: Conjunction, key: str) -> float:
    """The strictest bound of a part."""
    is_least = key.startswith("min")
    bounds = [schema[key] for schema in part if isinstance(schema.get(key), int | float)]
    found: float = (max if is_least else min)([-float("inf") if is_least else float("inf"), *bounds])
    return found


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key, ())
    return list(value) if isinstance(value, list) else []
