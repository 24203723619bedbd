"""Prints the schemas that Pydantic, Pydantic AI and the Python SDKs send, as JSON.

    python tests/text/schemas/forms/pydantic_forms.py > tests/text/schemas/forms/pydantic.json

It needs pydantic, pydantic-ai-slim, openai, openai-agents and anthropic, in an environment of their own.
"""

import importlib.metadata
import json
from collections import deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pydantic as p
from agents import function_tool
from agents.agent_output import AgentOutputSchema
from anthropic import transform_schema
from openai.lib._pydantic import to_strict_json_schema
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    EmailStr,
    Field,
    RootModel,
    SecretStr,
    StringConstraints,
)
from pydantic_ai import Tool
from pydantic_ai._json_schema import InlineDefsJsonSchemaTransformer
from pydantic_ai.profiles.openai import OpenAIJsonSchemaTransformer
from typing_extensions import TypedDict


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str
    city: str = Field(description="A city.", examples=["Oslo"])
    postcode: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Fox(BaseModel):
    kind: Literal["fox"]
    den: Address


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Box[T](BaseModel):
    content: T


class Größe(BaseModel):
    höhe: float


class Point(NamedTuple):
    x: int
    y: int


class Settings(TypedDict, total=False):
    theme: str
    size: int


class Add(BaseModel):
    op: Literal["add"]
    left: "Expression"
    right: "Expression"


class Number(BaseModel):
    op: Literal["number"]
    value: float


Expression = Annotated[Add | Number, Field(discriminator="op")]
Add.model_rebuild()


def model(name: str, config: ConfigDict | None = None, **fields: Any) -> type[BaseModel]:
    return p.create_model(name, __config__=config, **fields)


ANIMAL = Annotated[Cat | Dog | Fox, Field(discriminator="kind")]
MODELS: dict[str, type[BaseModel]] = {
    "scalars": model(
        "M", a=(int, ...), b=(float, ...), c=(bool, ...), d=(str, ...), e=(None, None)
    ),
    "optional": model("M", a=(int | None, None), b=(str | None, "x"), c=(list[int] | None, None)),
    "defaults": model("M", a=(int, 1), b=(list[str], []), c=(dict[str, int], {})),
    "enum": model("M", a=(Colour, ...), b=(Level, ...), c=(Colour | None, None)),
    "enum default": model("M", a=(Colour, Colour.RED)),
    "literal": model(
        "M",
        a=(Literal["x", "y"], ...),
        b=(Literal[1, "one", True, None], ...),
        c=(Literal["only"], "only"),
    ),
    "nested": model("M", home=(Address, ...), others=(list[Address], [])),
    "optional nested": model("M", home=(Address | None, None)),
    "described reference": model(
        "M", home=(Annotated[Address, Field(description="Where.", title="H")], ...)
    ),
    "recursive": Node,
    "generic": model("M", a=(Box[int], ...), b=(Box[Address], ...), c=(Box[list[Box[int]]], ...)),
    "names beyond ASCII": model("M", g=(Größe, ...), liste=(list[Größe], ...)),
    "union": model("M", a=(int | str | list[int], ...), b=(Cat | Address, ...)),
    "discriminated": model("M", pet=(ANIMAL, ...), pets=(list[ANIMAL], ...)),
    "discriminated recursive": model("M", expression=(Expression, ...)),
    "root list": RootModel[list[Address]],
    "root union": RootModel[ANIMAL],
    "root dict": RootModel[dict[str, int]],
    "dict": model(
        "M",
        a=(dict[str, int], ...),
        b=(dict[str, Address], ...),
        c=(dict[str, Any], ...),
        d=(dict, ...),
    ),
    "dict of enum": model("M", a=(dict[Colour, int], ...)),
    "dict of literal": model("M", a=(dict[Literal["x", "y"], float], ...)),
    "dict of int": model("M", a=(dict[int, str], ...)),
    "dict of pattern": model(
        "M", a=(dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int], ...)
    ),
    "dict of length": model(
        "M", a=(dict[Annotated[str, StringConstraints(min_length=1, max_length=8)], int], ...)
    ),
    "dict of uuid": model("M", a=(dict[UUID, int], ...)),
    "dict sizes": model("M", a=(Annotated[dict[str, int], Field(min_length=1, max_length=3)], ...)),
    "dict sizes two": model("M", a=(Annotated[dict[str, int], Field(min_length=2)], ...)),
    "set": model("M", a=(set[int], ...), b=(frozenset[str], ...)),
    "set sized": model("M", a=(Annotated[set[int], Field(min_length=1, max_length=5)], ...)),
    "tuples": model(
        "M", a=(tuple[int, str], ...), b=(tuple[int, ...], ...), c=(Point, ...), d=(tuple[()], ...)
    ),
    "sequences": model(
        "M", a=(deque[int], ...), b=(Annotated[list[int], Field(min_length=1, max_length=3)], ...)
    ),
    "bounds": model(
        "M",
        a=(Annotated[int, Field(ge=0, lt=10)], ...),
        b=(Annotated[float, Field(gt=0, le=1.5)], ...),
    ),
    "multiple": model(
        "M",
        a=(Annotated[int, Field(multiple_of=5)], ...),
        b=(Annotated[float, Field(multiple_of=0.5)], ...),
    ),
    "large bounds": model(
        "M",
        a=(Annotated[int, Field(ge=0, le=2**64 - 1)], ...),
        b=(Annotated[int, Field(le=2**63 - 1)], ...),
    ),
    "lengths": model("M", a=(Annotated[str, Field(min_length=1, max_length=20)], ...)),
    "pattern": model("M", a=(Annotated[str, Field(pattern=r"^\d{3}-\w+$")], ...)),
    "pattern look-ahead": model(
        "M", a=(Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d).{8,}$"})], ...)
    ),
    "dates": model("M", a=(datetime, ...), b=(date, ...), c=(time, ...), d=(timedelta, ...)),
    "identifiers": model("M", a=(UUID, ...), b=(AnyUrl, ...), c=(p.HttpUrl, ...), d=(Path, ...)),
    "email": model("M", a=(EmailStr, ...)),
    "addresses": model("M", a=(IPv4Address, ...), b=(IPv6Address, ...)),
    "formats": model(
        "M",
        a=(SecretStr, ...),
        b=(bytes, ...),
        c=(p.Base64Bytes, ...),
        d=(p.ByteSize, ...),
        e=(p.Json, ...),
    ),
    "decimal": model(
        "M",
        a=(Decimal, ...),
        b=(Annotated[Decimal, Field(ge=0, max_digits=6, decimal_places=2)], ...),
    ),
    "any": model("M", a=(Any, ...), b=(object, ...), c=(list[Any], ...), d=(list, ...)),
    "extra forbid": model("M", ConfigDict(extra="forbid"), a=(int, ...)),
    "extra allow": model("M", ConfigDict(extra="allow"), a=(int, ...)),
    "extra keys": model(
        "M", ConfigDict(json_schema_extra={"examples": [{"a": 1}], "x-order": 1}), a=(int, ...)
    ),
    "unknown keywords": model(
        "M", a=(Annotated[int, Field(json_schema_extra={"unit": "m", "widget": "slider"})], ...)
    ),
    "unknown format": model(
        "M", a=(Annotated[str, Field(json_schema_extra={"format": "color"})], ...)
    ),
    "deprecated": model("M", a=(Annotated[int, Field(deprecated=True)], 0)),
    "aliases": model("M", a=(Annotated[int, Field(alias="some-name with blank/slash~")], ...)),
    "typed dict": model("M", a=(Settings, ...)),
    "null pattern union": model("M", a=(Annotated[str, Field(pattern="^a+$")] | None, None)),
    "conditional": model(
        "M",
        ConfigDict(
            json_schema_extra={
                "if": {"properties": {"a": {"const": 1}}},
                "then": {"required": ["b"]},
            }
        ),
        a=(int, ...),
        b=(str | None, None),
    ),
    "not": model("M", a=(Annotated[str, Field(json_schema_extra={"not": {"const": ""}})], ...)),
    "many": model("M", **{f"field_{number}": (int | None, None) for number in range(60)}),
    "deep": model("M", a=(list[list[list[dict[str, list[Address]]]]], ...)),
    "same name": model("M", a=(Address, ...), b=(model("Address", street=(int, ...)), ...)),
}


def weather(
    city: str, days: Annotated[int, Field(ge=1, le=7)] = 3, units: Literal["C", "F"] = "C"
) -> str:
    """Weather of a city.

    Args:
        city: its name.
        days: number of days.
        units: of temperatures.
    """
    return ""


def search(
    query: str, filters: Settings | None = None, tags: list[str] | None = None, **more: int
) -> str:
    """Search."""
    return ""


def place(pet: Cat | Dog, at: Address) -> str:
    """Place a pet."""
    return ""


FUNCTIONS = (weather, search, place)


def forms() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(source: str, name: str, schema: Any, **more: Any) -> None:
        found.append({"source": source, "name": name, "schema": schema, **more})

    for name, one in MODELS.items():
        add("pydantic", name, one.model_json_schema())
    add("pydantic", "serialization", MODELS["defaults"].model_json_schema(mode="serialization"))
    add("pydantic", "type adapter", p.TypeAdapter(list[ANIMAL]).json_schema())
    for name in (
        "scalars",
        "nested",
        "discriminated",
        "recursive",
        "dict",
        "tuples",
        "optional",
        "formats",
        "bounds",
    ):
        add("openai", name, to_strict_json_schema(MODELS[name]), strict=True)
        add("anthropic", name, transform_schema(MODELS[name]))
    for name in ("discriminated", "generic", "recursive", "dict", "set", "dates"):
        schema = MODELS[name].model_json_schema()
        add("pydantic-ai", name, OpenAIJsonSchemaTransformer(schema, strict=None).walk())
        if name != "recursive":
            add("pydantic-ai", f"{name} inline", InlineDefsJsonSchemaTransformer(schema).walk())
    for function in FUNCTIONS:
        add("pydantic-ai", f"tool {function.__name__}", Tool(function).function_schema.json_schema)
        add(
            "openai-agents",
            f"tool {function.__name__}",
            function_tool(function, strict_mode=False).params_json_schema,
        )
    add(
        "openai-agents",
        "strict tool weather",
        function_tool(weather).params_json_schema,
        strict=True,
    )
    for name in ("nested", "discriminated", "recursive"):
        add(
            "openai-agents",
            f"output {name}",
            AgentOutputSchema(MODELS[name]).json_schema(),
            strict=True,
        )
    return found


if __name__ == "__main__":
    names = ("pydantic", "pydantic-ai-slim", "openai", "openai-agents", "anthropic")
    versions = {name: importlib.metadata.version(name) for name in names}
    print(
        json.dumps(
            {"versions": versions, "forms": forms()}, ensure_ascii=False, indent=None
        ).replace('{"source"', '\n{"source"')
    )
