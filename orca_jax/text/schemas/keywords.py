"""The keywords of JSON Schema by their meaning for a grammar, and the values that a grammar takes."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of schemas by name
LISTS = ("allOf", "anyOf", "oneOf")
SINGLE = ("additionalProperties", "items", "additionalItems")  # a schema

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

ANNOTATIONS = frozenset(
    (
        *(
            "title",
            "description",
            "default",
            "examples",
            "example",
            "deprecated",
            "readOnly",
            "writeOnly",
        ),
        *(
            "contentMediaType",
            "contentEncoding",
            "contentSchema",
            "discriminator",
            "xml",
            "externalDocs",
        ),
        *(
            "$comment",
            "$schema",
            "$id",
            "id",
            "$anchor",
            "$dynamicAnchor",
            "$recursiveAnchor",
            "$vocabulary",
        ),
        *("$defs", "definitions"),
    )
)
"""Keywords that restrict no value. Names that begin with `x-` belong to them."""

UNENFORCEABLE = frozenset(
    (
        *(
            "uniqueItems",
            "not",
            "if",
            "contains",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        ),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that no grammar enforces, but for values without effect."""

COMPANIONS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords without effect but beside another one, which stands for them in errors."""

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that the library enforces. Others are annotations."""

TYPES: Mapping[str, frozenset[str]] = {
    **{
        name: frozenset({name})
        for name in ("null", "boolean", "string", "array", "object", "integer")
    },
    "number": frozenset({"integer", "fraction"}),
}
"""Types as sets that have no value in common, unless they share a name."""

MAX_NAMES = 100_000  # names that all parts together may get from others
MAX_MULTIPLES = 100_000  # of all `multipleOf` of a schema together: the library makes a state for each remainder
MAX_EXACT = 2**53  # the library reads numbers as floats
MAX_BOUND = 2**63 - 2**10  # the largest bound for which the library makes an expression, as a float

# The library drops these characters, which JSON writes as \uXXXX, from constants and patterns.
_DROPPED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_DROPPED_ESCAPE = re.compile(r"\\(?:[0cv]|x(?:0[0-7bBeEfF]|1.|7[fF])|u00(?:0[0-7bBeEfF]|1.|7[fF]))")

_ZOD_LOCAL = r"[A-Za-z0-9_'+\-]"
PLAIN_PATTERNS = {
    # zod's address of an email: no dot at the begin, no two dots in a row, and no quote before the "@"
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^({_ZOD_LOCAL}+\.)*{_ZOD_LOCAL}*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    )
}
"""Usual patterns with look-around, and equal ones without it."""


class WrongSchemaError(ValueError):
    """A schema that is not one, or is too large."""


class SchemaTooLargeError(WrongSchemaError):
    """Parts of the schema have too many names together."""


class UnenforceableError(ValueError):
    """A value of a keyword that a grammar cannot enforce."""


class MultipleBudget:
    """The states that `multipleOf` may still take in the automata of a schema.

    The library multiplies those that meet in one value, so their least common multiple has the limit too.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._common = 1

    def spend(self, multiple: float) -> None:
        """Count a multiple. Raises UnenforceableError if it is too large beside the earlier ones."""
        size = _without_tens(multiple)
        common = math.lcm(self._common, size)
        if max(self._sum + size, common) > MAX_MULTIPLES:
            raise UnenforceableError("a grammar cannot enforce multiples of so large a number")
        self._sum += size
        self._common = common


def _without_tens(number: float) -> int:
    """The numerator without factors of 2 and 5: the last digits of a number decide about those."""
    size = Fraction(str(number)).numerator
    for factor in (2, 5):
        while size % factor == 0:
            size //= factor
    return size


class NameBudget:
    """The number of names that the parts of a schema may still get from others."""

    def __init__(self) -> None:
        self._left = MAX_NAMES

    def spend(self, num_names: int) -> None:
        """Count names. Raises SchemaTooLargeError."""
        self._left -= num_names
        if self._left < 0:
            raise SchemaTooLargeError("its parts have too many properties together")


def kind_of(value: object) -> str:
    """Return the type of a JSON value, as `TYPES` has it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def number_of(key: str, value: object) -> int | float:
    """Return the value of a keyword for numbers. Bounds beyond 2**53 are moved inwards, to a number that is exact.

    Raises:
        UnenforceableError: the number is too large to be exact.
        WrongSchemaError: the value is not a number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise WrongSchemaError("must be a number")
    if key in UPPER and value > MAX_BOUND:
        return MAX_BOUND
    if key in LOWER and value < -MAX_BOUND:
        return -MAX_BOUND
    if isinstance(value, float):
        if value.is_integer() and abs(value) < MAX_EXACT:
            return int(value)
        return value
    if abs(value) <= MAX_EXACT:
        return value
    if key not in (*LOWER, *UPPER) or abs(value) > MAX_BOUND:
        raise UnenforceableError("the number is too large")
    step = 1 << (value.bit_length() - 53)
    if key in UPPER:
        return value // step * step
    return -(-value // step) * step


def exact(value: Any) -> Any:
    """Return a value of `const` or `enum` with integers as such.

    Raises:
        UnenforceableError: a number is too large, or a text has a control character.
    """
    if isinstance(value, str) and _DROPPED.search(value):
        raise UnenforceableError("it has a control character")
    if isinstance(value, list):
        return [exact(one) for one in value]
    if isinstance(value, Mapping):
        return {name: exact(one) for name, one in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_of("const", value)
    return value


# Classes of characters, in which escapes have other meanings; other escapes; and the begin of a look-around.
_PARTS = re.compile(r"\[(?:\\.|[^\]\\])*\]?|\\(?P<escape>.)|(?P<look>\(\?<?[=!])", re.DOTALL)


def plain_pattern(pattern: str) -> str:
    """Return a pattern without look-around. Raises UnenforceableError if there is none."""
    known = PLAIN_PATTERNS.get(pattern)
    if known is not None:
        return known
    if _DROPPED.search(pattern):
        raise UnenforceableError("it has a control character")
    for part in _PARTS.finditer(pattern):
        if part["look"]:
            raise UnenforceableError("it has look-around")
        if part["escape"] is None:
            continue
        if part["escape"] in "bBk123456789":
            raise UnenforceableError("it has a word boundary or a backreference")
        if _DROPPED_ESCAPE.match(pattern, part.start()):
            raise UnenforceableError("it has a control character")
    return pattern
