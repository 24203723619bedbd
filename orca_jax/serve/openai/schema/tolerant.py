"""The reading of bodies that the strict decoder refuses: without unused fields, with values taken by their meaning.

Null fields and the ignored fields of `unused.py` are left out. A number such as 16.0 counts as an integer if the field
has one. All other differences remain errors.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.serve.openai.schema.unused import MAX_NAME, UnusedFields, check_unused
from orca_jax.values.checks import did_you_mean
from orca_jax.values.errors import UNREADABLE

MAX_EXACT = 2**53  # from here on, a float may stand for several integers


class Ignored(NamedTuple):
    """The ignored fields of a body, by their path without indices, such as "messages.id"."""

    known: tuple[str, ...] = ()  # listed in `unused.py`
    # named by the body alone: ignored by --unknown-fields, or left out of a list
    unknown: tuple[str, ...] = ()


NOTHING_IGNORED = Ignored()


class _ObjectShape(NamedTuple):
    """A nested object. `tag` is the value of `tag_field` that distinguishes it from others in the same place."""

    name: str
    tag_field: str | None
    tag: object
    fields: Mapping[str, tuple["_Shape", bool]]  # with True for required ones


class _Shape(NamedTuple):
    """The accepted types of a value, as far as they matter here."""

    objects: tuple[_ObjectShape, ...] = ()
    items: "_Shape | None" = None
    takes_integers: bool = False  # and no other numbers


class TolerantReader[T: msgspec.Struct]:
    """Reads bodies of one kind."""

    def __init__(self, kind: type[T], unused: UnusedFields) -> None:
        self._kind = kind
        self._unused = unused
        self._shape: _ObjectShape | None = None

    def read(self, values: Mapping[str, object], *, ignores_unknown: bool) -> tuple[T, Ignored]:
        """Make a request of the values of a body.

        Raises:
            ApiError: a field is unknown, or its value is not accepted.
            msgspec.ValidationError: a value is wrong.
        """
        if self._shape is None:  # most servers see only bodies that the strict decoder accepts
            (self._shape,) = _shape_of(inspect.type_info(self._kind)).objects
        reading = _Reading(ignores_unknown)
        plain = reading.read_object(values, self._shape, self._unused, "")
        request = msgspec.convert(plain, self._kind, str_keys=True)
        if reading.unknown is not None:  # after the errors of known fields, which often explain it
            raise reading.unknown
        return request, reading.ignored()


class _Reading:
    """The reading of one body."""

    def __init__(self, ignores_unknown: bool) -> None:
        self._ignores_unknown = ignores_unknown
        self._known: dict[str, None] = {}
        self._others: dict[str, None] = {}
        # the error for the first unknown field of a nested object
        self.unknown: ApiError | None = None

    def ignored(self) -> Ignored:
        """The ignored fields so far."""
        return Ignored(tuple(self._known), tuple(self._others))

    def read_object(
        self, values: Mapping[str, object], shape: _ObjectShape, unused: UnusedFields, where: str
    ) -> dict[str, object]:
        """The fields of an object that have an effect. `where` is its path with a final dot."""
        kept: dict[str, object] = {}
        for name, value in values.items():
            known = shape.fields.get(name)
            if known is not None:
                inner, is_required = known
                if value is not None or is_required:
                    kept[name] = self._read(value, inner, where + name)
            elif name == shape.tag_field:
                kept[name] = value
            elif value is not None:
                self._leave_out(name, value, unused, where, shape.fields)
        return kept

    def _read(self, value: object, shape: _Shape, where: str) -> object:
        if (
            isinstance(value, float)
            and shape.takes_integers
            and value.is_integer()
            and abs(value) < MAX_EXACT
        ):
            return int(value)
        if isinstance(value, list) and shape.items is not None:
            return [
                self._read(item, shape.items, f"{where}[{index}]")
                for index, item in enumerate(value)
            ]
        if isinstance(value, dict):
            for one in shape.objects:
                if one.tag_field is None or value.get(one.tag_field) == one.tag:
                    return self.read_object(value, one, NESTED.get(one.name, {}), where + ".")
        return value

    def _leave_out(
        self,
        name: str,
        value: object,
        unused: UnusedFields,
        where: str,
        fields: Collection[str],
    ) -> None:
        field = unused.get(name)
        path = re.sub(r"\[\d+\]", "", where + name)
        if field is None and self._ignores_unknown:
            self._others[path] = None
            return
        try:
            hint = did_you_mean(name[:MAX_NAME], fields) if field is None else ""
            if check_unused(field, where + name, value, hint):
                self._known[path] = None
        except ApiError as error:
            if not where or field is not None:
                raise
            self.unknown = self.unknown or error


def _shape_of(info: inspect.Type) -> _Shape:
    found = _Shape()
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    has_floats = False
    for kind in kinds:
        match kind:
            case inspect.Metadata(type=inner):
                one = _shape_of(inner)
                found = _Shape(
                    found.objects + one.objects,
                    found.items or one.items,
                    found.takes_integers or one.takes_integers,
                )
            case inspect.StructType():
                found = found._replace(objects=(*found.objects, _object_of(kind)))
            case inspect.ListType(item_type=item):
                inner_shape = _shape_of(item)
                found = found._replace(items=None if inner_shape == _Shape() else inner_shape)
            case inspect.IntType():
                found = found._replace(takes_integers=True)
            case inspect.FloatType():
                has_floats = True
    return found._replace(takes_integers=found.takes_integers and not has_floats)


def _object_of(info: inspect.StructType) -> _ObjectShape:
    fields = {field.encode_name: (_shape_of(field.type), field.required) for field in info.fields}
    return _ObjectShape(info.cls.__name__, info.tag_field, info.tag, fields)


def read_values(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The values of a body's fields. Raises ApiError; `param` names the field."""
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        try:
            values[name] = msgspec.json.decode(raw)
        except RecursionError:
            raise ApiError(400, f"{name[:100]} is nested too deeply", name[:100]) from None
        except UNREADABLE as error:
            raise ApiError(400, f"{name[:100]}: {lowered(str(error))}", name[:100]) from None
    return values


def lowered(text: str) -> str:
    """The text with a small first letter, for the middle of a message."""
    return text[:1].lower() + text[1:]
