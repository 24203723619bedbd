"""Word problems with small numbers: the answer shows its steps, or is JSON."""

import ast
import operator
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from demo.tasks.example import Conversation, Example, as_json
from demo.tasks.words import cast, with_articles

LARGEST = 100  # of all numbers in a problem

_SIGNS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("x", operator.mul),
    ast.Div: ("/", operator.floordiv),
}
_GAINS = (
    "{He} buys {b} more.", "{He} finds {b} more.", "{He} gets {b} more.", "{m} gives {him} {b} more.",
    "Then {he} buys {b} {t}.", "{He} gets {b} {t} from {m}.", "Later {he} finds {b} {t}.", "{He} picks up {b} more {t}.",
    "{m} brings {b} {t}.", "{His} friend gives {him} {b}.", "{He} buys {b} more {t}.", "{He} makes {b} more.",
)  # fmt: skip
_LOSSES = (
    "{He} gives {b} to {m}.", "{He} gives {b} {t} to {his} sister.", "{He} loses {b}.", "{He} sells {b}.",
    "{He} gives away {b}.", "Then {he} loses {b} {t}.", "{m} takes {b} of them.", "{b} of them break.",
    "{He} gives {b} to {his} brother.", "{He} sells {b} {t}.", "{He} throws {b} away.", "{He} uses {b} of them.",
)  # fmt: skip
_DOUBLINGS = ("Then {he} gets {b} times as many.", "The number grows to {b} times as many.")
_ASK = (
    "How many {t} does {n} have now?", "How many {t} does {n} have?", "How many {t} are there now?", "How many?",
    "How many does {he} have now?", "How many {t} does {he} have in the end?", "How many {t} are left?",
    "How many {t} does {he} have left?", "What is the number of {t} now?", "How many {t} has {n} got now?",
)  # fmt: skip
_BEGIN = ("{n} has {a} {t}.", "{n} has {a} {t}.", "{n} had {a} {t}.", "{n} owns {a} {t}.", "There are {a} {t}. {n} owns them.")  # fmt: skip
_SHORT = {
    "a + b": (
        "{n} has {a} {t} and buys {b}.", "{n} has {a} {t} and buys {b} more.", "{n} has {a} {t} and gets {b} more.",
        "{n} has {a} {t} and finds {b} more.", "{n} had {a} {t} and got {b} more.", "{n} has {a} {t}, {m} has {b}. They put them together.",
    ),
    "a - b": (
        "{n} has {a} {t} and eats {b}.", "{n} has {a} {t} and loses {b}.", "{n} has {a} {t} and gives {b} to {m}.",
        "{n} had {a} {t} and gave {b} away.", "{n} has {a} {t} and sells {b} of them.",
    ),
    "a * b": ("{n} has {a} {c} with {b} {t} each.", "{n} has {a} {c} of {b} {t}.", "{n} buys {a} {c} with {b} {t} in each."),
}  # fmt: skip
_DRILLS = ("What is {q}?", "{q}", "{q} =", "{q} = ?", "Calculate {q}.", "Compute {q}.", "How much is {q}?", "Please compute {q}.", "what is {q}", "Solve {q}.")  # fmt: skip
_SPOKEN = {"+": (" plus ", "+"), "-": (" minus ", "-"), "x": (" times ", "*", " * ", "x"), "/": (" divided by ", "/")}
_AS_JSON = (
    "Answer as JSON.", "Answer in JSON.", "Reply as JSON.", "Reply with JSON.", "Give the answer as JSON.",
    "Answer with a JSON object.", 'Answer as JSON with the key "{t}".', "Return JSON.", "JSON only, please.",
)  # fmt: skip


class Template(NamedTuple):
    """A wording of a problem, with its computation."""

    formula: str
    question: str
    answer: str


@cache
def templates() -> tuple[tuple[Template, ...], tuple[Template, ...]]:
    """The wordings of problems.txt for training, and those for the test alone."""
    blocks = (Path(__file__).parent / "problems.txt").read_text(encoding="utf-8").split("\n\n")
    rows = [[Template(*line.split(" | ")) for line in block.splitlines() if " | " in line] for block in blocks[1:]]
    return tuple(rows[0]), tuple(rows[1])


def steps(formula: str, numbers: dict[str, int]) -> tuple[list[str], int]:
    """The steps of a formula in words, in order, and its value.

    Raises:
        ValueError: an intermediate result is negative, too large or not whole.
    """
    shown: list[str] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return numbers[node.id]
        assert isinstance(node, ast.BinOp), formula
        left, right = value(node.left), value(node.right)
        sign, compute = _SIGNS[type(node.op)]
        if sign == "/" and left % right:
            raise ValueError("not whole")
        result = compute(left, right)
        if not 0 <= result <= LARGEST:
            raise ValueError("out of range")
        shown.append(f"{left} {sign} {right} = {result}.")
        return result

    return shown, value(ast.parse(formula, mode="eval").body)


def solved(random: Random, formula: str) -> tuple[dict[str, int], list[str], int]:
    """Numbers for a formula with small results, its steps and its result."""
    names = sorted(set(re.findall("[a-e]", formula)))
    factors = {name for pair in re.findall(r"([a-e]) [*] ([a-e])", formula) for name in pair}
    factors.update(re.findall(r"[*/] ([a-e])", formula))
    top = random.choice((10, 20, 50, 99))
    while True:
        numbers = {name: random.randint(2, 12 if name in factors else top) for name in names}
        top = min(99, top + 1)
        try:
            shown, result = steps(formula, numbers)
        except ValueError:
            continue
        if result > 0:
            return numbers, shown, result


def from_template(random: Random, template: Template) -> Example:
    """A problem with this wording."""
    numbers, shown, result = solved(random, template.formula)
    places = {**cast(random), **numbers}
    answer = template.answer.format(**{**places, "r": result})
    return Example(with_articles(template.question.format(**places)), " ".join([*shown, answer]), result)


def fixed(random: Random) -> Conversation:
    """A problem with a wording of problems.txt."""
    return (from_template(random, random.choice(templates()[0])),)


def unseen(random: Random) -> Conversation:
    """A problem with a wording that no training has."""
    return (from_template(random, random.choice(templates()[1])),)


def story(random: Random) -> Conversation:
    """A problem of one to three events, which change a number of things."""
    kinds = random.choices("+-*", weights=(5, 5, 1), k=random.choice((1, 1, 2, 2, 3)))
    formula = "a"
    for name, kind in zip("bcde", kinds, strict=False):
        formula = f"({formula}) {kind} {name}" if kind == "*" and formula != "a" else f"{formula} {kind} {name}"
    numbers, shown, result = solved(random, formula)
    places: dict[str, object] = {**cast(random), **numbers}
    places["His"] = str(places["his"]).capitalize()
    text = [random.choice(_BEGIN).format(**places)]
    for name, kind in zip("bcde", kinds, strict=False):
        pool = {"+": _GAINS, "-": _LOSSES, "*": _DOUBLINGS}[kind]
        text.append(random.choice(pool).format(**{**places, "b": numbers[name]}))
    if len(text) == 3 and text[2].startswith(f"{places['He']} ") and text[1].startswith(f"{places['He']} "):
        if random.random() < 0.5:  # "He buys 3 more and gives 2 to Mia."
            text[1:] = [text[1].removesuffix(".") + " and " + text[2].removeprefix(f"{places['He']} ")]
    text.append(random.choice(_ASK).format(**places))
    return (Example(" ".join(text), " ".join([*shown, "{n} has {r} {t}.".format(**places, r=result)]), result),)


def _one_step(random: Random) -> tuple[str, str, int, list[str], str]:
    """A short problem: the text, the things, the result, the steps and the hero."""
    formula = random.choice(tuple(_SHORT))
    numbers, shown, result = solved(random, formula)
    places = {**cast(random), **numbers}
    text = random.choice(_SHORT[formula]).format(**places)
    ask = random.choice(("How many?", "How many {t}?", "How many {t} does {n} have?", "How many {t} are there?", "How many now?", "How many are there?"))  # fmt: skip
    return f"{text} {ask.format(**places)}", places["t"], result, shown, places["n"]


def short(random: Random) -> Conversation:
    """A problem of one step in few words."""
    text, things, result, shown, name = _one_step(random)
    return (Example(text, f"{shown[0]} {name} has {result} {things}.", result),)


def in_json(random: Random) -> Conversation:
    """A problem of one step, answered by JSON."""
    text, things, result, _, _ = _one_step(random)
    request = random.choice(_AS_JSON).format(t=things)
    return (Example(f"{text} {request}" if random.random() < 0.8 else f"{request} {text}", as_json({things: result})),)


def drill(random: Random) -> Conversation:
    """A sum, difference, product or quotient."""
    kind = random.choice("++--*/")
    numbers, shown, result = solved(random, f"a {kind} b")
    sign = "x" if kind == "*" else kind
    spoken = random.choice((f" {sign} ", f" {sign} ", *_SPOKEN[sign]))
    text = random.choice(_DRILLS).format(q=f"{numbers['a']}{spoken}{numbers['b']}")
    return (Example(text, shown[0], result),)

