"""A JSON schema made ready for a grammar, with the names of all that the grammar does not enforce."""

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

from orca_jax.text.schemas.closed import OpenUnion, closed
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.reader import SchemaReader
from orca_jax.text.schemas.references import check_depth
from orca_jax.text.schemas.unions import UnionCheck

MAX_SCHEMA = 2**20  # characters of a JSON schema
MAX_NESTING = 64


class PreparedSchema(NamedTuple):
    """A schema of which a grammar enforces every keyword.

    A value that matches it also matches the given schema, but for the keywords that were left out.
    """

    schema: dict[str, Any]
    left_out: Mapping[str, str]  # why a keyword cannot be enforced, by its path
    annotations: Collection[str]  # paths of unknown formats and keywords, which restrict no value


def prepared(schema: Mapping[str, Any]) -> PreparedSchema:
    """Return a schema with closed objects and without annotations. Its definitions have plain names, in `$defs`.

    Preparing the result again changes nothing of its meaning, and leaves nothing out.

    Raises:
        WrongSchemaError: it is not a JSON schema, or too large.
    """
    _check_nesting(schema)
    reader = SchemaReader(schema)
    read = reader.read()
    whole, unions = closed(read)
    check = UnionCheck(whole, read)
    left_out = dict(reader.left_out)
    for union in unions:
        if not check.is_exclusive(union.around["oneOf"], union.options):
            path = reader.unions[id(union.options)]
            left_out[path] = (
                "its schemas may match the same value: use anyOf, or give each a property with a constant"
            )
    for union in unions:  # after all comparisons, which read them
        _allow_any(union)
    check_depth(whole)
    return PreparedSchema(whole, left_out, reader.annotations.keys())


def _allow_any(union: OpenUnion) -> None:
    options = union.around.pop("oneOf")
    if "anyOf" in union.around:
        union.around["allOf"] = [*union.around.get("allOf", ()), {"anyOf": options}]
    else:
        union.around["anyOf"] = options


def _check_nesting(schema: object) -> None:
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [*chain.from_iterable(map(_parts, level))]
        if not level:
            return
    raise WrongSchemaError(f"it is nested more than {MAX_NESTING} levels deep")


def _parts(value: object) -> Collection[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list):
        return value
    return ()
