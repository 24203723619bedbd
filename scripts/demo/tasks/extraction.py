"""Extraction of named fields from a sentence to JSON."""

from collections.abc import Callable
from functools import cache
from random import Random

from demo.tasks.example import Conversation, Example, as_json
from demo.tasks.words import (
    first_name,
    full_name,
    invented_name,
    sections,
    with_articles,
    wording,
    words,
)

Value = str | int


def _pick(title: str) -> Callable[[Random], Value]:
    return lambda random: random.choice(words(title))


def _number(first: int, last: int) -> Callable[[Random], Value]:
    return lambda random: random.randint(first, last)


def _city(random: Random) -> Value:
    return invented_name(random) if random.random() < 0.15 else random.choice(words("cities"))


def _person(random: Random) -> Value:
    return full_name(random) if random.random() < 0.6 else first_name(random)


VALUES: dict[str, Callable[[Random], Value]] = {
    "name": _person,
    "author": full_name,
    "owner": first_name,
    "city": _city,
    "from": _city,
    "to": _city,
    "age": _number(2, 90),
    "job": _pick("jobs"),
    "item": _pick("things"),
    "quantity": _number(2, 60),
    "price": lambda random: (
        random.randint(2, 99) if random.random() < 0.7 else random.randint(100, 999)
    ),
    "event": _pick("events"),
    "place": _pick("places"),
    "day": _pick("days"),
    "time": lambda random: (
        f"{random.randint(7, 22)}:{random.choice((0, 15, 30, 45, random.randint(0, 59))):02}"
    ),
    "phone": lambda random: f"555-{random.randint(0, 9999):04}",
    "title": lambda random: "The " + " ".join(random.sample(words("titles"), 2)),
    "year": _number(1900, 2025),
    "weather": _pick("weather"),
    "temperature": _number(2, 38),
    "product": _pick("goods"),
    "colour": _pick("colours"),
    "pet": _pick("animals"),
    "hobby": _pick("hobbies"),
}


@cache
def forms() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """The fields and the texts of each kind of forms.txt."""
    found = []
    for head, *lines in sections("forms.txt").values():
        texts = [line.removeprefix("- ") for line in lines]
        found.append((tuple(head.split()[1:]), tuple(texts)))
    return tuple(found)


def extract(random: Random) -> Conversation:
    """A text, the names of some of its fields in any order, and these as JSON."""
    fields, texts = random.choice(forms())
    values = {field: VALUES[field](random) for field in fields}
    text = with_articles(random.choice(texts).format(**values))
    asked = list(fields)
    if random.random() < 0.5:
        asked = random.sample(asked, random.randint(1, len(asked)))
    named = ", ".join(asked[:-1]) + (" and " if len(asked) > 1 else "") + asked[-1]
    if random.random() < 0.3:
        named = ", ".join(asked)
    title = "extraction" if random.random() < 0.8 else "extraction with keys"
    request = wording(random, title).format(f=named, t=text)
    return (Example(request, as_json({field: values[field] for field in asked})),)
