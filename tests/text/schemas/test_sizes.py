"""Large schemas, and long chains of references, are compiled fast or refused."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import MAX_SCHEMA, prepared
from orca_jax.text.schemas.references import MAX_DEPTH
from orca_jax.values.errors import RequestError
from tests.covering import slow
from tests.text.schemas.answers import compiled
from tests.text.schemas.test_prepared import NUMBER, kind, ref


def chain(length: int, is_circle: bool = False) -> dict[str, Any]:
    definitions = {
        f"a{n}": {"type": "object", "properties": {"x": ref(f"a{n + 1}")}} for n in range(length)
    }
    return {**ref("a0"), "$defs": {**definitions, f"a{length}": ref("a0") if is_circle else NUMBER}}


@pytest.mark.parametrize("is_circle", [False, True])
def test_chains_of_references_do_not_end_the_process(is_circle: bool) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} levels"):
        compiled(chain(4_000, is_circle))
    compiled(chain(MAX_DEPTH // 4, is_circle))
    plain = {f"a{n}": ref(f"a{n + 1}") for n in range(4_000)}
    compiled({**ref("a0"), "$defs": {**plain, "a4000": NUMBER}})
    assert time.process_time() - start < 10


def names(count: int, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: fields for name in listed(count)},
        "required": listed(count),
    }


def listed(count: int) -> list[str]:
    return [f"property_with_a_long_name_{n}" for n in range(count)]


LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "properties": lambda: names(9_000, type="string"),
    "descriptions": lambda: names(400, type="string", description="d" * 2_000),
    "optional": lambda: {"properties": names(14_000, type="string")["properties"]},
    "ranges": lambda: names(8_000, type="integer", minimum=7, maximum=10**12 + 1),
    "patterns": lambda: names(8_000, type="string", pattern="^[a-z]{3,9}-[0-9]+$"),
    "enumeration": lambda: {"enum": listed(23_000)},
    "constants": lambda: {"oneOf": [{"const": name} for name in listed(15_000)]},
    "union": lambda: {"oneOf": [kind(name) for name in listed(5_000)]},
    "unlike union": lambda: {"oneOf": [{"type": "object", "properties": {name: {}}} for name in listed(5_000)]},
    "definitions": lambda: {
        "items": {"anyOf": [ref(f"d{n}") for n in range(3_000)]},
        "$defs": {f"d{n}": names(5) for n in range(3_000)},
    },
    "objects": lambda: {"prefixItems": [names(20, type="number") for _ in range(600)]},
    "circle": lambda: {
        **ref("a0"),
        "$defs": {
            f"a{n}": {"properties": {f"x{m}": ref(f"a{(n + m) % 60}") for m in range(60)}} for n in range(60)
        },
    },
    "unions of unions": lambda: {
        "oneOf": [ref("u0"), ref("u1")],
        "$defs": {f"u{n}": {"oneOf": [ref(f"u{n + m}") for m in (1, 2) if n < 40]} for n in range(42)},
    },
}  # fmt: skip
CHEAP = ("descriptions", "circle", "unions of unions", "enumeration", "optional")


@pytest.mark.parametrize(
    "name",
    [name if name in CHEAP else slow(name) for name in LARGE],
)
def test_schemas_of_up_to_a_megabyte_are_fast_or_refused(name: str) -> None:
    schema = LARGE[name]()
    assert len(json.dumps(schema)) < MAX_SCHEMA * 1.3
    start = time.process_time()
    try:
        compiled(prepared(schema).schema).allowed()
    except (RequestError, WrongSchemaError) as error:
        assert len(str(error)) < 700
    assert time.process_time() - start < 4, "seconds of processors"


def test_values_of_a_union_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A union of 230 enums, 31 KiB, wrote both enums of each pair: 5.7 s."""
    written: list[object] = []

    def dumps(value: object, **options: Any) -> str:
        written.append(value)
        return json.dumps(value, **options)

    monkeypatch.setattr("orca_jax.text.schemas.unions.json", SimpleNamespace(dumps=dumps))
    schema = {"oneOf": [{"enum": [0, *(f"{i}-{j}" for j in range(20))]} for i in range(230)]}
    found = prepared(schema)
    assert list(found.left_out) == ["oneOf"]
    assert len(written) <= 2 * 230 * 21  # of the closed schema and of the given one


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "integer", "multipleOf": 2**31 - 1}, ["multipleOf"]),  # hours, for 40 characters
        ({"type": ["integer", "string"], "multipleOf": 1_000_003}, ["multipleOf"]),  # 5 s
        (
            {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
            ["allOf.1.multipleOf"],
        ),
        (
            {"type": "object", "properties": {f"p{n}": {"multipleOf": 999} for n in range(102)}},
            ["properties.p100.multipleOf", "properties.p101.multipleOf"],
        ),
        ({"type": "integer", "multipleOf": 1_000_000}, []),  # six zeros at the end
        ({"type": "number", "multipleOf": 0.01}, []),
        ({"type": "integer", "multipleOf": 86_400}, []),
    ],
)
def test_large_multiples_are_left_out(schema: dict[str, Any], left_out: list[str]) -> None:
    """The library makes a state for each remainder, and multiplies those that meet."""
    found = prepared(schema)
    assert list(found.left_out) == left_out
    assert all("multiples" in reason for reason in found.left_out.values())
