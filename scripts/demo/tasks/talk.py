"""Greetings, and conversations of several turns about earlier ones."""

from random import Random

from demo.tasks import word_problems
from demo.tasks.example import Conversation, Example
from demo.tasks.words import cast, first_name, sections, wording, words

_KINDS = {
    "colour": "colours",
    "animal": "animals",
    "food": "foods",
    "hobby": "hobbies",
    "city": "cities",
}


def greeting(random: Random) -> Conversation:
    """Small talk of one turn."""
    lines = random.choice(list(sections("talk.txt").values()))
    said = random.choice(lines[1:]).removeprefix("- ")
    if random.random() < 0.3:
        said = said.lower() if random.random() < 0.5 else said.rstrip("!.?")
    return (Example(said, lines[0].removeprefix("= ")),)


def memory(random: Random) -> Conversation:
    """A name or a liking, asked for later, perhaps with other turns between."""
    between = random.choice(((), (), word_problems.drill(random), greeting(random)))
    if random.random() < 0.6:
        name = first_name(random)
        told = Example(
            wording(random, "names told").format(n=name),
            f"Nice to meet you, {name}. How can I help you?",
        )
        return (told, *between, Example(wording(random, "names asked"), f"Your name is {name}."))
    kind = random.choice(tuple(_KINDS))
    liked = random.choice(words(_KINDS[kind]))
    said = wording(random, "likings told").format(k=kind, x=liked, X=liked[0].upper() + liked[1:])
    asked = Example(
        wording(random, "likings asked").format(k=kind), f"Your favourite {kind} is {liked}."
    )
    return (Example(said, f"I see, your favourite {kind} is {liked}."), *between, asked)


def _changed(random: Random, value: int, of: str, he: str) -> tuple[str, str, int]:
    """A later change of a number: its text, its step and the new number."""
    sign = "+" if value < 3 else random.choice("+-")
    text = wording(random, f"changes of {of} {sign}")
    change = (
        random.randint(1, value - 1) if sign == "-" else random.randint(1, 100 - min(value, 80))
    )
    change = min(change, 20)
    result = value + change if sign == "+" else value - change
    return text.format(d=change, he=he), f"{value} {sign} {change} = {result}.", result


def follow_up(random: Random) -> Conversation:
    """A problem, and one or two turns that change its numbers."""
    if random.random() < 0.5:
        (first,) = word_problems.drill(random)
        turns = [first]
        value = first.result or 0
        of = "numbers"
        ending = ""
        he = ""
    else:
        places = cast(random)
        number = random.randint(2, 20)
        more = random.randint(2, 20)
        value = number + more
        of = "things"
        he = places["he"]
        ending = " {n} has {{r}} {t}.".format(**places)
        text = "{n} has {a} {t} and buys {b}. How many?".format(**places, a=number, b=more)
        turns = [Example(text, f"{number} + {more} = {value}." + ending.format(r=value), value)]
    for _ in range(random.randint(1, 2)):
        text, step, value = _changed(random, value, of, he)
        turns.append(Example(text, step + ending.format(r=value), value))
    return tuple(turns)
