"""Greetings, and conversations of several turns about earlier ones."""

from random import Random

from demo.tasks import word_problems
from demo.tasks.example import Conversation, Example
from demo.tasks.words import cast, first_name, sections, words

_NAMED = ("My name is {n}.", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.", "I'm {n}.", "Hello! I am {n}.", "You can call me {n}.")  # fmt: skip
_ASK_NAME = ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "What was my name?", "Tell me my name.")  # fmt: skip
_LIKES = ("My favourite {k} is {x}.", "{X} is my favourite {k}.", "I like {x}. It is my favourite {k}.")
_ASK_LIKES = ("What is my favourite {k}?", "Which {k} do I like?", "What {k} do I like?", "Do you remember my favourite {k}?")  # fmt: skip
_KINDS = {"colour": "colours", "animal": "animals", "food": "foods", "hobby": "hobbies", "city": "cities"}
_MORE = (("And if {he} gets {d} more?", "+"), ("And if {he} buys {d} more?", "+"), ("Now {he} finds {d} more. How many?", "+"), ("Then {he} loses {d}. How many are left?", "-"), ("And if {he} gives {d} away?", "-"), ("And after {he} eats {d} of them?", "-"))  # fmt: skip
_CHANGE = (("Add {d}.", "+"), ("And plus {d}?", "+"), ("Now add {d}.", "+"), ("Add {d} to that.", "+"), ("Subtract {d}.", "-"), ("And minus {d}?", "-"), ("Now take away {d}.", "-"), ("Subtract {d} from that.", "-"))  # fmt: skip


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
        told = Example(random.choice(_NAMED).format(n=name), f"Nice to meet you, {name}. How can I help you?")
        return (told, *between, Example(random.choice(_ASK_NAME), f"Your name is {name}."))
    kind = random.choice(tuple(_KINDS))
    liked = random.choice(words(_KINDS[kind]))
    said = random.choice(_LIKES).format(k=kind, x=liked, X=liked[0].upper() + liked[1:])
    asked = Example(random.choice(_ASK_LIKES).format(k=kind), f"Your favourite {kind} is {liked}.")
    return (Example(said, f"I see, your favourite {kind} is {liked}."), *between, asked)


def _changed(random: Random, value: int, choices: tuple[tuple[str, str], ...], he: str) -> tuple[str, str, int]:
    """A later change of a number: its text, its step and the new number."""
    text, sign = random.choice(choices)
    if sign == "-" and value < 3:
        text, sign = choices[0]
    change = random.randint(1, value - 1) if sign == "-" else random.randint(1, 100 - min(value, 80))
    change = min(change, 20)
    result = value + change if sign == "+" else value - change
    return text.format(d=change, he=he), f"{value} {sign} {change} = {result}.", result


def follow_up(random: Random) -> Conversation:
    """A problem, and one or two turns that change its numbers."""
    if random.random() < 0.5:
        (first,) = word_problems.drill(random)
        turns, value, choices, ending, he = [first], first.result or 0, _CHANGE, "", ""
    else:
        places = cast(random)
        number, more = random.randint(2, 20), random.randint(2, 20)
        value, choices, he = number + more, _MORE, places["he"]
        ending = " {n} has {{r}} {t}.".format(**places)
        text = "{n} has {a} {t} and buys {b}. How many?".format(**places, a=number, b=more)
        turns = [Example(text, f"{number} + {more} = {value}." + ending.format(r=value), value)]
    for _ in range(random.randint(1, 2)):
        text, step, value = _changed(random, value, choices, he)
        turns.append(Example(text, step + ending.format(r=value), value))
    return tuple(turns)
