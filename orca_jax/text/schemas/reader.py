"""Reads a JSON schema as generators write it into one with the keywords that a grammar enforces, and no others."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from orca_jax.text.schemas.keywords import (
    ANNOTATIONS,
    COMPANIONS,
    COUNTS,
    FORMATS,
    LISTS,
    LOWER,
    TYPES,
    UNENFORCEABLE,
    UPPER,
    MultipleBudget,
    NameBudget,
    UnenforceableError,
    WrongSchemaError,
    exact,
    number_of,
    plain_pattern,
)
from orca_jax.text.schemas.names import evaluated_names, restrict_counts, restrict_names
from orca_jax.text.schemas.references import Path, References, SchemaPlace, safe_name

# properties of an object that may be left out: more exceed a limit of steps at its begin
MAX_OPTIONAL = 490
_SETTLED = UNENFORCEABLE | {"propertyNames"}  # read after the keywords beside them


class SchemaReader:
    """The reading of one schema.

    Attributes:
        left_out: why a grammar cannot enforce a keyword, by its path.
        annotations: paths of the unknown formats and keywords, which restrict no value.
        unions: path of each `oneOf`, by the id of its list in the result.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.left_out: dict[str, str] = {}
        self._multiples = MultipleBudget()
        self.annotations: dict[str, None] = {}
        self.unions: dict[int, str] = {}
        self._root = root
        is_old = any([draft in str(root.get("$schema")) for draft in ("draft-0", "2019-09")])
        self._references = References(root)
        self._names: dict[Path, str] = {}  # of definitions, by the path of their schema
        self._pending: list[tuple[str, Path, Any]] = []
        self._defs: dict[str, Any] = {}
        self._budget = NameBudget()
        # schemas of `propertyNames` that are referred to
        self._schemas_of_names: dict[Path, Any] = {}
        self._num_names: Counter[str] = Counter()  # further names made of each name
        self._readers: dict[str, Callable[[dict[str, Any], str, Any, Path], None]] = {
            **dict.fromkeys(("properties", "patternProperties"), self._read_map),
            **dict.fromkeys((*LISTS, "prefixItems"), self._read_list),
            "additionalProperties": self._read_single,
            "additionalItems": self._read_additional,
            "items": self._read_items,
            **dict.fromkeys(COUNTS, _read_count),
            **dict.fromkeys((*LOWER, *UPPER), _read_number),
            "multipleOf": self._read_multiple,
            "const": _read_value,
            "enum": _read_values,
            "type": _read_type,
            "required": _read_required,
            "pattern": _read_pattern,
            "format": self._read_format,
            "$ref": self._read_reference,
        }
        if is_old:
            del self._readers["prefixItems"]

    def read(self) -> dict[str, Any]:
        """Return the schema, with the definitions that it uses in `$defs`.

        Raises:
            WrongSchemaError: a keyword has a value that is not one of JSON Schema.
        """
        made = self._schema(self._root, ())
        if made is False:
            made = {"enum": []}
        while self._pending:
            name, path, schema = self._pending.pop()
            self._defs[name] = self._schema(schema, path)
        if not self._defs:
            return made
        return {**made, "$defs": self._defs}

    def _schema(self, schema: Any, path: Path) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise WrongSchemaError(f"{dotted(path)} must be a schema: an object, true or false")
        made: dict[str, Any] = {}
        keys = [key for key, value in schema.items() if not _has_no_effect(key, value, schema)]
        for key in keys:
            if key in self._readers:
                self._read_keyword(made, key, schema[key], (*path, key))
            elif key not in COMPANIONS and key not in _SETTLED:
                self.annotations[dotted((*path, key))] = None
        for key in keys:
            if key in _SETTLED and key not in self._readers:
                self._settle(made, schema, key, schema[key], (*path, key))
        _check_width(made, path)
        for key in restrict_counts(made):
            self.left_out[dotted((*path, key))] = f"a grammar cannot enforce {key} here"
        if "not" in made:
            return False
        return made

    def _read_keyword(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        try:
            self._readers[key](made, key, value, path)
        except UnenforceableError as error:
            self.left_out[dotted(path)] = str(error)
        except WrongSchemaError as error:
            text = str(error)
            if text.startswith("must be"):
                text = f"{dotted(path)} {text}"
            raise WrongSchemaError(text) from None

    def _read_multiple(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        number = number_of(key, value)
        if number <= 0:
            raise WrongSchemaError("must be larger than 0")
        self._multiples.spend(number)
        made[key] = number

    def _read_map(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        if not isinstance(value, Mapping):
            raise WrongSchemaError("must be an object")
        made[key] = {
            name: self._schema(one, (*path, name))
            for name, one in value.items()
            if key == "properties" or self._takes_pattern(name, path)
        }

    def _takes_pattern(self, pattern: str, path: Path) -> bool:
        """True if the names of `patternProperties` have no rule that cannot be enforced."""
        try:
            return plain_pattern(pattern) == pattern
        except UnenforceableError as error:
            self.left_out[dotted((*path, pattern))] = str(error)
            return False

    def _read_list(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        if not isinstance(value, list):
            raise WrongSchemaError("must be a list")
        read = [self._schema(one, (*path, str(at))) for at, one in enumerate(value)]
        if key == "oneOf":
            self.unions[id(read)] = dotted(path)
        made[key] = read

    def _read_single(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        made[key] = self._schema(value, path)

    def _read_additional(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        made["items"] = self._schema(value, path)  # after a list of items, in older drafts

    def _read_items(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        if isinstance(value, list):
            self._read_list(made, "prefixItems", value, path)
        else:
            self._read_single(made, key, value, path)

    def _read_format(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        if not isinstance(value, str):
            raise WrongSchemaError("must be the name of a format")
        if value in FORMATS:
            made[key] = value
        else:
            self.annotations[dotted(path)] = None

    def _read_reference(self, made: dict[str, Any], key: str, value: Any, path: Path) -> None:
        place = self._references.find(value)
        if not place.path:
            made[key] = "#"
            return
        name = self._names.get(place.path)
        if name is None:
            name = self._new_name(safe_name(place.path))
            self._names[place.path] = name
            self._pending.append((name, place.path, place.schema))
        made[key] = f"#/$defs/{name}"

    def _new_name(self, wanted: str) -> str:
        name = wanted
        while name in self._defs:
            self._num_names[wanted] += 1
            name = f"{wanted}-{self._num_names[wanted] + 1}"
        self._defs[name] = {}
        return name

    def _settle(
        self, made: dict[str, Any], schema: Mapping[str, Any], key: str, value: Any, path: Path
    ) -> None:
        """Add what a keyword means for a grammar to the schema, or leave it out."""
        if self._has_no_effect(made, schema, key, value):
            return
        if key == "not" and value in (True, {}):
            made[key] = value
            return
        is_settled = False
        if key == "propertyNames":
            is_settled = self._restrict(made, value, path)
        elif key.startswith("unevaluated"):
            is_settled = self._settle_unevaluated(made, schema, key, path)
        if not is_settled:
            self.left_out.setdefault(dotted(path), f"a grammar cannot enforce {key}")

    def _has_no_effect(
        self, made: Mapping[str, Any], schema: Mapping[str, Any], key: str, value: Any
    ) -> bool:
        match key:
            case "uniqueItems":
                return value is False or made.get("maxItems", 2) <= 1
            case "not":
                return value is False
            case "if":
                return schema.get("then") is None and schema.get("else") is None
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return value == {}
            case "unevaluatedProperties":
                return value in (True, {}) or "additionalProperties" in made
            case "unevaluatedItems":
                return value in (True, {}) or "items" in made
        return False

    def _restrict(self, made: dict[str, Any], value: Any, path: Path) -> bool:
        """Enforce `propertyNames`; False if it cannot be."""
        num_left_out = len(self.left_out)
        try:
            place = None
            if isinstance(value, Mapping) and "$ref" in value:
                place = self._references.find(value["$ref"])
        except UnenforceableError:
            return False
        names = self._schema(value, path) if place is None else self._names_at(place)
        if len(self.left_out) != num_left_out or (place is not None and len(value) > 1):
            return False
        if isinstance(names, dict) and names.pop("format", None) is not None:
            self.annotations[dotted((*path, "format"))] = None
        return restrict_names(made, names, self._shared, self._budget)

    def _names_at(self, place: SchemaPlace) -> Any:
        """The schema of names at a place, read once."""
        if place.path not in self._schemas_of_names:
            self._schemas_of_names[place.path] = self._schema(place.schema, place.path)
        return copy.copy(self._schemas_of_names[place.path])

    def _shared(self, schema: Any) -> Any:
        """Return a reference to a schema that is used several times."""
        if not isinstance(schema, Mapping) or len(schema) < 2:
            return schema
        name = self._new_name("value")
        self._defs[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def _settle_unevaluated(
        self, made: dict[str, Any], schema: Mapping[str, Any], key: str, path: Path
    ) -> bool:
        """Enforce `unevaluatedProperties` and `unevaluatedItems` by their plain relatives; False if it cannot be."""
        plain = "items" if key == "unevaluatedItems" else "additionalProperties"
        if not any([part in made for part in (*LISTS, "$ref")]):
            self._read_single(made, plain, schema[key], path)
            return True
        if plain == "items" or schema[key] is not False:
            return False
        names = evaluated_names(schema, self._references, self._budget)
        if names is None:
            return False
        made["properties"] = {
            **made.get("properties", {}),
            **{name: True for name in names - made.get("properties", {}).keys()},
        }
        made["additionalProperties"] = False
        return True


def _check_width(made: Mapping[str, Any], path: Path) -> None:
    required = frozenset(made.get("required", ()))
    optional = [
        name
        for name, one in made.get("properties", {}).items()
        if name not in required and one is not False
    ]
    if len(optional) > MAX_OPTIONAL:
        what = f"has {len(optional)} properties that may be left out; a grammar takes at most {MAX_OPTIONAL}"
        raise WrongSchemaError(
            f"{dotted(path)} {what}: list them in required, or put them into objects of their own"
        )


def dotted(path: Path) -> str:
    """Return a path as text."""
    return ".".join(path) or "the schema"


def _read_count(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    number = number_of(key, value)
    if not isinstance(number, int) or number < 0:
        raise WrongSchemaError("must be an integer from 0 on")
    made[key] = number


def _read_number(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    is_flag = key.startswith("exclusive") and isinstance(value, bool)  # of draft 4
    made[key] = value if is_flag else number_of(key, value)


def _read_value(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    made[key] = exact(value)


def _read_values(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    if not isinstance(value, list):
        raise WrongSchemaError("must be a list")
    made[key] = exact(value)


def _read_type(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise WrongSchemaError(f"must be one of {', '.join(TYPES)}, got {str(name)[:100]!r}")
    made[key] = list(dict.fromkeys(value)) if isinstance(value, list) else value


def _read_required(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    if isinstance(value, bool):  # of draft 3, and in tools written by hand
        raise UnenforceableError("required must be a list of names beside properties")
    if not isinstance(value, list) or not all([isinstance(name, str) for name in value]):
        raise WrongSchemaError("must be a list of names")
    made[key] = list(dict.fromkeys(value))


def _read_pattern(made: dict[str, Any], key: str, value: Any, path: Path) -> None:
    if not isinstance(value, str):
        raise WrongSchemaError("must be a regular expression")
    made[key] = plain_pattern(value)


def _has_no_effect(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """True for keys that say nothing about values, and for those that others make void."""
    if key == "additionalItems":
        return value is None or not isinstance(schema.get("items"), list)
    return (value is None and key != "const") or key in ANNOTATIONS or key.startswith("x-")
