"""instructor: typed answers by tools and by JSON schemas, complete, partial, nested, synchronous and asynchronous."""

import asyncio
import sys
from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from lab.judges.clients import checks
from lab.judges.clients.checks import Check, Settings, expect

MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Climate(Enum):
    """The climate of a country."""

    MILD = "mild"
    COLD = "cold"


class Closed(BaseModel):
    """Base without further keys: a small model would invent them without end."""

    model_config = ConfigDict(extra="forbid")


class City(Closed):
    """A city with bounded fields."""

    name: str = Field(max_length=8, pattern="^[A-Z][a-z]{2,6}$")
    size: Literal["small", "large"]
    districts: list[Literal["north", "south"]] = Field(min_length=1, max_length=2)
    age: int = Field(ge=0, le=99)


class Country(Closed):
    """A nested model."""

    capital: City
    climate: Climate
    is_large: bool


class Subject:
    """Clients with the address and the key filled in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._common: dict[str, Any] = {
            "base_url": f"{settings.url}/v1",
            "api_key": settings.api_key,
            "max_retries": 0,
            "timeout": 60,
        }

    def client(self, mode: instructor.Mode) -> Any:
        """A client in this mode."""
        return instructor.from_openai(OpenAI(**self._common), mode=mode)

    def async_client(self, mode: instructor.Mode) -> Any:
        """An asynchronous client in this mode."""
        return instructor.from_openai(AsyncOpenAI(**self._common), mode=mode)

    def fields(self, **fields: Any) -> dict[str, Any]:
        """The fields of every call."""
        talk = [{"role": "user", "content": "Tell me of a city."}]
        return {
            "model": self.settings.model,
            "messages": talk,
            "max_tokens": 300,
            "max_retries": 0,
            **fields,
        }


def whole(s: Subject, mode: instructor.Mode) -> None:
    city = s.client(mode).chat.completions.create(response_model=City, **s.fields())
    expect(isinstance(city, City) and 0 <= city.age <= 99, f"{city}")


def nested(s: Subject, mode: instructor.Mode) -> None:
    country = s.client(mode).chat.completions.create(response_model=Country, **s.fields())
    expect(isinstance(country.capital, City) and country.climate in Climate, f"{country}")


def partial(s: Subject, mode: instructor.Mode) -> None:
    states = list(s.client(mode).chat.completions.create_partial(response_model=City, **s.fields()))
    expect(
        len(states) > 5,
        f"{len(states)} states: the arguments of a call come in pieces, as a text does",
    )
    expect(states[-1].size in ("small", "large"), f"{states[-1]}")


def with_completion(s: Subject, mode: instructor.Mode) -> None:
    city, raw = s.client(mode).chat.completions.create_with_completion(
        response_model=City, **s.fields()
    )
    expect(isinstance(city, City) and raw.usage.completion_tokens > 0, f"{raw}")


def asynchronous(s: Subject, mode: instructor.Mode) -> None:
    async def several() -> list[Any]:
        client = s.async_client(mode)
        calls = (
            client.chat.completions.create(response_model=City, **s.fields(seed=i))
            for i in range(4)
        )
        return await asyncio.gather(*calls)

    expect(all(isinstance(city, City) for city in asyncio.run(several())), "four cities at once")


def in_mode(check: Callable[[Subject, instructor.Mode], None], mode: instructor.Mode) -> Check:
    """The check in one mode, with the mode in its name."""

    def named(s: Subject) -> None:
        check(s, mode)

    named.__name__ = f"{check.__name__}_{mode.value}"
    return named


IN_EACH_MODE = (whole, nested, partial, with_completion, asynchronous)
CHECKS = [in_mode(check, mode) for mode, check in product(MODES, IN_EACH_MODE)]


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    return checks.run(CHECKS, Subject(settings), ["instructor", "openai"], settings.report)


if __name__ == "__main__":
    sys.exit(main())
