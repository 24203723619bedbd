"""Word problems with small numbers: the answer shows its steps, or is JSON."""

import ast
import operator
import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple

from demo.tasks.example import Conversation, Example, as_json
from demo.tasks.words import cast, with_articles, wording

LARGEST = 100  # of all numbers in a problem

_SIGNS: dict[type[ast.operator], tuple[str, Callable[[int, int], int]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("x", operator.mul),
    ast.Div: ("/", operator.floordiv),
}
_SPOKEN = {
    "+": (" plus ", "+"),
    "-": (" minus ", "-"),
    "x": (" times ", "*", " * ", "x"),
    "/": (" divided by ", "/"),
}


class Template(NamedTuple):
    """A wording of a problem, with its computation."""

    formula: str
    question: str
    answer: str


@cache
def templates() -> tuple[tuple[Template, ...], tuple[Template, ...]]:
    """The wordings of problems.txt for training, and those for the test alone."""
    blocks = (Path(__file__).parent / "problems.txt").read_text(encoding="utf-8").split("\n\n")
    return _templates_of(blocks[1]), _templates_of(blocks[2])


def _templates_of(block: str) -> tuple[Template, ...]:
    return tuple(Template(*line.split(" | ")) for line in block.splitlines() if " | " in line)


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
        left = value(node.left)
        right = value(node.right)
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
    factors = set(chain.from_iterable(re.findall(r"([a-e]) [*] ([a-e])", formula)))
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
    return Example(
        with_articles(template.question.format(**places)), " ".join([*shown, answer]), result
    )


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
        formula = (
            f"({formula}) {kind} {name}"
            if kind == "*" and formula != "a"
            else f"{formula} {kind} {name}"
        )
    numbers, shown, result = solved(random, formula)
    places: dict[str, object] = {**cast(random), **numbers}
    places["His"] = str(places["his"]).capitalize()
    text = [wording(random, "beginnings of stories").format(**places)]
    for name, kind in zip("bcde", kinds, strict=False):
        title = {"+": "gains", "-": "losses", "*": "multiplications"}[kind]
        text.append(wording(random, title).format(**{**places, "b": numbers[name]}))
    again = f"{places['He']} "
    if (
        len(text) == 3
        and all(part.startswith(again) for part in text[1:])
        and random.random() < 0.5
    ):
        text[1:] = [text[1].removesuffix(".") + " and " + text[2].removeprefix(again)]
    text.append(wording(random, "questions of stories").format(**places))
    return (
        Example(
            " ".join(text),
            " ".join([*shown, "{n} has {r} {t}.".format(**places, r=result)]),
            result,
        ),
    )


def _one_step(random: Random) -> tuple[str, str, int, list[str], str]:
    """A short problem: the text, the things, the result, the steps and the hero."""
    formula = random.choice(("a + b", "a - b", "a * b"))
    numbers, shown, result = solved(random, formula)
    words = cast(random)
    text = f"{wording(random, f'short {formula}')} {wording(random, 'questions of short ones')}"
    return text.format(**{**words, **numbers}), words["t"], result, shown, words["n"]


def short(random: Random) -> Conversation:
    """A problem of one step in few words."""
    text, things, result, shown, name = _one_step(random)
    return (Example(text, f"{shown[0]} {name} has {result} {things}.", result),)


def in_json(random: Random) -> Conversation:
    """A problem of one step, answered by JSON."""
    text, things, result, _, _ = _one_step(random)
    request = wording(random, "requests for JSON").format(t=things)
    return (
        Example(
            f"{text} {request}" if random.random() < 0.8 else f"{request} {text}",
            as_json({things: result}),
        ),
    )


def drill(random: Random) -> Conversation:
    """A sum, difference, product or quotient."""
    kind = random.choice("++--*/")
    numbers, shown, result = solved(random, f"a {kind} b")
    sign = "x" if kind == "*" else kind
    spoken = random.choice((f" {sign} ", f" {sign} ", *_SPOKEN[sign]))
    text = wording(random, "drills").format(q=f"{numbers['a']}{spoken}{numbers['b']}")
    return (Example(text, shown[0], result),)
