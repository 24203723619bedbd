"""Rules for the names of properties, in keywords that a grammar enforces."""

from collections.abc import Callable, Mapping
from typing import Any

from orca_jax.text.schemas.keywords import LISTS, NameBudget, UnenforceableError
from orca_jax.text.schemas.references import References

_MORE = (
    "anyOf",
    "oneOf",
    "patternProperties",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)


def restrict_names(
    made: dict[str, Any], names: Any, shared: Callable[[Any], Any], budget: NameBudget
) -> bool:
    """Enforce `propertyNames` by other keywords; False if they cannot.

    Args:
        made: the schema around it, which is changed.
        names: the schema of the names, after it was read.
        shared: returns a reference to a schema that is used several times.
        budget: counts the names that the schema gets.

    Raises:
        SchemaTooLargeError: the budget is exceeded.
    """
    if names is True or (
        isinstance(names, Mapping) and _is_string(names) and not names.keys() - {"type"}
    ):
        return True
    if names is False:
        made.update(
            properties=dict.fromkeys(made.get("properties", ()), False), additionalProperties=False
        )
        made.pop("patternProperties", None)
        return True
    if not _is_string(names) or "patternProperties" in made:
        return False
    rules = names.keys() - {"type"}
    if rules <= {"enum", "const"}:
        listed = names.get("enum", [])
        if "const" in names:
            listed = [names["const"]]
        budget.spend(len(listed))
        known = {name for name in names.get("enum", listed) if isinstance(name, str)}
        allowed = [name for name in listed if isinstance(name, str) and name in known]
        _list_names(made, allowed, shared)
        return True
    if made.get("properties") or made.get("required"):
        return False
    if rules == {"pattern"}:
        pattern = names["pattern"]
    elif rules <= {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    else:
        return False
    made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
    made["additionalProperties"] = False
    return True


def _list_names(made: dict[str, Any], allowed: list[str], shared: Callable[[Any], Any]) -> None:
    """Allow no other names than these."""
    properties = made.get("properties", {})
    known = frozenset(allowed)
    found = {name: schema if name in known else False for name, schema in properties.items()}
    other = made.get("additionalProperties", "properties" not in made)
    missing = [name for name in allowed if name not in found]
    if len(missing) > 1 and other is not False:
        other = shared(other)
    if other is not False:
        found.update(dict.fromkeys(missing, other))
    made.update(properties=found, additionalProperties=False)


def _is_string(names: Mapping[str, Any]) -> bool:
    kinds = names.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def restrict_counts(made: dict[str, Any]) -> list[str]:
    """Drop `minProperties` and `maxProperties` where other keywords enforce them. Return those that nothing enforces.

    A grammar does not count properties that may be left out. It cannot see that two names are equal.
    """
    required = set(made.get("required", ()))
    properties = made.get("properties", {})
    optional = [
        name for name, schema in properties.items() if name not in required and schema is not False
    ]
    is_closed = (
        not made.get("patternProperties")
        and made.get("additionalProperties", "properties" not in made) is False
    )
    has_parts = any([part in made for part in (*LISTS, "$ref")])
    left_out = []
    least = made.get("minProperties")
    most = made.get("maxProperties")
    if least is not None and least <= len(required):
        del made["minProperties"]
    elif least is not None and (
        has_parts
        or least > len(required) + 1
        or (optional and not (is_closed and most in (None, least)))
    ):
        del made["minProperties"]
        left_out.append("minProperties")
    if most is not None and is_closed and not has_parts and len(optional) + len(required) <= most:
        del made["maxProperties"]
    elif most is not None and (
        has_parts or (optional and not (is_closed and most == len(required) + 1))
    ):
        del made["maxProperties"]
        left_out.append("maxProperties")
    return left_out


def evaluated_names(schema: Any, references: References, budget: NameBudget) -> set[str] | None:
    """Return the names of the properties in a schema and in all parts of it; None if they depend on the value.

    Raises:
        WrongSchemaError: a reference leads nowhere, or the budget is exceeded.
    """
    found: set[str] = set()
    pending = [schema]
    seen = set()
    while pending:
        one = pending.pop()
        if not isinstance(one, Mapping):
            return None
        if (
            any([key in one for key in _MORE])
            or one.get("additionalProperties", False) is not False
        ):
            return None
        properties = one.get("properties", {})
        parts = one.get("allOf", [])
        budget.spend(1)
        if isinstance(properties, Mapping):
            budget.spend(len(properties))
            found.update(properties)
        if isinstance(parts, list):
            pending += parts
        if "$ref" in one and one["$ref"] not in seen:
            seen.add(one["$ref"])
            try:
                pending.append(references.find(one["$ref"]).schema)
            except UnenforceableError:
                return None
    return found
