"""Lists of words for the generators, and texts with places for them."""

import re
from functools import cache
from pathlib import Path
from random import Random

_FOLDER = Path(__file__).parent
_PRONOUNS = {"he": ("he", "his", "him"), "she": ("she", "her", "her")}


@cache
def sections(name: str) -> dict[str, list[str]]:
    """The lines of each section ("# title") of a file in this folder."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in (_FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
            found[title] = []
        elif title and line.strip():
            found[title].append(line.strip())
    return found


@cache
def words(title: str) -> tuple[str, ...]:
    """The words of one list of words.txt, each once."""
    return tuple(dict.fromkeys(" ".join(sections("words.txt")[title]).split()))


@cache
def wordings(title: str) -> tuple[str, ...]:
    """The lines of one list of wordings.txt."""
    return tuple(line.replace("\\n", "\n") for line in sections("wordings.txt")[title])


def wording(random: Random, title: str) -> str:
    """One line of a list of wordings.txt."""
    return random.choice(wordings(title))


def some(random: Random, title: str, count: int) -> list[str]:
    """Different words of a list."""
    return random.sample(words(title), count)


def invented_name(random: Random) -> str:
    """A name in no list, which can only be copied."""
    return "".join(random.choices(words("syllables"), k=random.randint(2, 3))).capitalize()


def first_name(random: Random) -> str:
    """A first name, one of ten invented."""
    return (
        invented_name(random)
        if random.random() < 0.1
        else random.choice(words("he") + words("she"))
    )


def full_name(random: Random) -> str:
    """A first name and a surname."""
    last = invented_name(random) if random.random() < 0.1 else random.choice(words("surnames"))
    return f"{first_name(random)} {last}"


def cast(random: Random) -> dict[str, str]:
    """Words for the places of a problem: people with pronouns, things, containers, colours, goods and shops."""
    gender = random.choice(("he", "she"))
    he, his, him = _PRONOUNS[gender]
    others = [name for name in some(random, "he", 2) + some(random, "she", 2)]
    hero = random.choice([name for name in words(gender) if name not in others])
    random.shuffle(others)
    return {
        **dict(zip("mo", others, strict=False)),
        **dict(zip("tsu", some(random, "things", 3), strict=True)),
        **dict(zip(("c", "c1", "c2"), some(random, "containers", 3), strict=True)),
        **dict(zip("kl", some(random, "colours", 2), strict=True)),
        **{"n": hero, "he": he, "He": he.capitalize(), "his": his, "him": him},
        **{"g": random.choice(words("goods")), "h": random.choice(words("shops"))},
    }


def with_articles(text: str) -> str:
    """The text with "an" in place of "a" before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
