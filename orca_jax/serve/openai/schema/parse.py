"""Parsing and checking of request bodies. Every error becomes a 400 that names the field."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.limits import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from orca_jax.serve.openai.schema.sampling import BIAS, CompletionFields
from orca_jax.serve.openai.schema.surrogates import lone_surrogate
from orca_jax.serve.openai.schema.tolerant import (
    NOTHING_IGNORED,
    Ignored,
    TolerantReader,
    lowered,
    read_values,
)
from orca_jax.serve.openai.schema.unused import UnusedFields
from orca_jax.values.errors import UNREADABLE

MAX_NAMED = 100  # wrong keys that an error names
BOM = b"\xef\xbb\xbf"
_ESCAPED_COMMAS = (b"\\u002c", b"\\u002C")
type Settle = Callable[[dict[str, Any]], Sequence[str]]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROLES = "system, developer, user, assistant or tool"


class BodyParser[T: msgspec.Struct]:
    """Parses and checks bodies of one kind.

    Args:
        kind: the table of fields.
        unused: the fields without effect.
        settle: changes the values of a body that the strict decoder refuses, such as objects without a `type`.
            It returns the names of what it has left out, and may raise ApiError.
    """

    def __init__(self, kind: type[T], unused: UnusedFields, settle: Settle | None = None) -> None:
        self.kind = kind
        self.unused = unused
        self._settle = settle
        self._known = frozenset(kind.__struct_fields__)
        self._decoder = msgspec.json.Decoder(kind)
        self._tolerant = TolerantReader(kind, unused)

    def parse(self, body: bytes, *, ignores_unknown: bool = False) -> tuple[T, Ignored]:
        """Parse a body and check everything that does not depend on the model. Returns also the ignored fields.

        Raises:
            ApiError: 400 for a wrong field, named by `param`; 413 for too many values.
        """
        body = body.removeprefix(BOM)
        _refuse_crowds(body)
        try:
            fields = _fields.decode(body)
            refuse_duplicates(body, fields)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            raise _invalid(error, {}) from None
        except UNREADABLE as error:
            if (path := lone_surrogate(body)) is not None:
                raise _half(path) from None
            raise ApiError(400, f"the body is not valid JSON: {error}") from None
        request, ignored = self._read(body, fields, ignores_unknown)
        if isinstance(request, CompletionFields):
            check_stream(request)
        return request, ignored

    def _read(
        self, body: bytes, fields: Mapping[str, msgspec.Raw], ignores_unknown: bool
    ) -> tuple[T, Ignored]:
        if fields.keys() <= self._known:
            try:
                return self._decoder.decode(body), NOTHING_IGNORED
            except UNREADABLE:
                pass  # read again below
        values = read_values(fields)
        left_out: Sequence[str] = ()
        if self._settle is not None:
            left_out = self._settle(values)
        try:
            request, ignored = self._tolerant.read(values, ignores_unknown=ignores_unknown)
        except msgspec.ValidationError as error:
            raise _invalid(error, values) from None
        if left_out:
            ignored = ignored._replace(unknown=(*ignored.unknown, *left_out))
        return request, ignored


def check_stream(request: CompletionFields) -> None:
    """Check the fields that require a stream or forbid it. Raises ApiError."""
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise ApiError(
                400, f"{name} must be false or null here", name, code="unsupported_parameter"
            )
        if options.continuous_usage_stats and not options.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{name} needs include_usage", name)
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            400,
            "prompt_logprobs cannot be combined with stream: leave out stream",
            "prompt_logprobs",
        )


def _refuse_crowds(body: bytes) -> None:
    """Refuse a body that takes too long to parse, or too much memory. Raises ApiError.

    A thread does not help: the parser holds the interpreter's lock. Commas and brackets within strings count too.
    """
    if len(body) <= MAX_CONTAINERS:
        return
    num_containers = body.count(b"[") + body.count(b"{")
    # two of each string, or only the first behind a backslash
    num_quotes = body.count(b'"') - body.count(b'\\"')
    if (
        body.count(b",") > MAX_VALUES
        or num_containers > MAX_CONTAINERS
        or num_quotes > 2 * MAX_STRINGS
    ):
        limits = (
            f"{MAX_VALUES} values, {MAX_CONTAINERS} lists and objects, or {MAX_STRINGS} strings"
        )
        message = f"the body has more than {limits}; split it into several requests"
        raise ApiError(413, message, code="request_too_large")


def refuse_duplicates(body: bytes, fields: Mapping[str, msgspec.Raw]) -> None:
    """Refuse a name with two values: a proxy may have checked the value that is not used.

    Commas outside of the values that count separate members, or are in names. A repeated name adds one.

    Args:
        body: an object of JSON.
        fields: its last value of each name.

    Raises:
        ApiError: a name is given twice, or has a comma that is written as an escape, which cannot be counted.
    """
    if any([_outside(body, fields, escape) for escape in _ESCAPED_COMMAS]):
        raise ApiError(
            400,
            "the name of a field has an escaped comma: write the comma itself, and each name once",
        )
    in_names = sum([name.count(",") for name in fields])
    if _outside(body, fields, b",") == max(0, len(fields) - 1) + in_names:
        return
    name = _repeated(body)
    raise ApiError(400, f"{name[:100]} is given twice", name[:100])


def _outside(body: bytes, fields: Mapping[str, msgspec.Raw], text: bytes) -> int:
    """The number of times that a text is in a body, without those in the values that count."""
    total = body.count(text)
    if not total:
        return 0
    return total - sum([bytes(value).count(text) for value in fields.values()])


def _repeated(body: bytes) -> str:
    """The first repeated name of a body."""
    repeated: list[str] = []

    def find(pairs: list[tuple[str, Any]]) -> None:
        counts = Counter([name for name, _ in pairs])
        # the outermost object is parsed last
        repeated[:] = [name for name, count in counts.items() if count > 1]

    # numbers of any length
    json.loads(body, object_pairs_hook=find, parse_int=len, parse_float=len)
    return repeated[0]


def _half(path: str) -> ApiError:
    where = path[:100] or "the body"
    what = "has half of a character (a surrogate without the other one), as a text that was cut may have"
    return ApiError(400, f"{where} {what}: send whole characters", path[:100] or None)


def _invalid(error: msgspec.ValidationError, values: Mapping[str, Any]) -> ApiError:
    """The answer for an error of `msgspec`; `values` are those of the body."""
    text = str(error)
    what, _, path = text.partition(" - at ")
    where = _param(path)
    if where == "logit_bias" and isinstance(values.get(where), dict):
        what = _wrong_bias(values[where]) or what
    if missing := re.search(r"missing required field `(\w+)`", what):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return ApiError(400, f"{name} is required", name, code="missing_required_parameter")
    if unknown := re.search(r"unknown field `(.{0,100})", what):
        what = "this field is unknown"
        where = ".".join(part for part in (where, unknown[1].rstrip("`")) if part)
    elif where is not None and where.endswith(".role"):
        what = f"must be {_ROLES}"
    elif where is not None and where.endswith("].type") and ".content[" in where:
        what = "only parts of type text are supported"
    return ApiError(400, f"{where or 'the body'}: {lowered(what)}", where)


def _wrong_bias(biases: Mapping[str, object]) -> str | None:
    """All wrong keys in words, else the first wrong value; None if the map as a whole is wrong."""
    keys: list[str] = []
    wrong_value: str | None = None
    for key, value in biases.items():
        fault = _bias_fault(key, value)
        if fault is None:
            continue
        quoted = msgspec.json.encode(key[:100]).decode()
        what, _, path = fault.partition(" - at ")
        if "key" in path:
            keys.append(quoted)
        elif wrong_value is None:
            wrong_value = f"the value of {quoted}: {lowered(what)}"
        if len(keys) == MAX_NAMED:
            break
    if not keys:
        return wrong_value
    name = "keys" if len(keys) > 1 else "key"
    return f"the {name} {', '.join(keys)} must be token ids such as 50256"


def _bias_fault(key: str, value: object) -> str | None:
    """The error of the decoder about one bias."""
    try:
        msgspec.convert({key: value}, BIAS, str_keys=True)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _param(path: str) -> str | None:
    """The name of a field: from `$.a[0].b`, or from "`key` in `$.a`". The key of `$.a[...]` is unknown."""
    return path.rpartition("`$")[2].rstrip("`").lstrip(".").replace("[...]", "")[:100] or None


def entries(values: Mapping[str, Any], field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a list of a body, with their indices."""
    found = values.get(field)
    if isinstance(found, list):
        yield from ((index, one) for index, one in enumerate(found) if isinstance(one, dict))
