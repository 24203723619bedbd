"""The public doors: commands of `orca-jax`, their flags, and the choices of a flag, read from the parsers."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from orca_jax.cli.completion import whole_parser
from orca_jax.values.checks import is_class_name
from orca_jax.values.config import ORDERINGS, PREDICTORS, SCHEDULERS
from orca_jax.values.speculation import SpeculativeMethod

SHARED = "any command"
"""The place of a flag that one function adds to many commands: it has the same help there, but for its default."""

MODULE = "MODULE:CLASS"
FILE = "FILE.py:CLASS"
BY_NAME: Mapping[str, Sequence[str]] = {
    "--decoder": (MODULE, FILE),
    "--scheduler": (*SCHEDULERS, MODULE, FILE),
    "--scheduling-policy": (*ORDERINGS, MODULE, FILE),
    "--length-predictor": (*PREDICTORS, "demo"),
    "--speculative-config": get_args(SpeculativeMethod),
}
"""The choices of flags whose values argparse does not know, from the tables that give them a meaning."""


class Door(NamedTuple):
    """A command, a flag of it, or a choice of the flag."""

    command: str
    flag: str = ""
    choice: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class Command(NamedTuple):
    """A command without commands below it. `shared` has the flags that other commands have too."""

    name: str
    parser: argparse.ArgumentParser
    shared: frozenset[str]

    @property
    def flags(self) -> Mapping[str, Door]:
        """The doors of the flags, by each of their spellings; positional arguments by their names."""
        found = {}
        for action in self.parser._actions:
            for name in action.option_strings or (action.dest,):
                found[name] = self._door(action)
        return found

    def _door(self, action: argparse.Action) -> Door:
        flag = _flag(action)
        return Door(SHARED if flag in self.shared else self.name, flag)

    def doors(self) -> Iterator[Door]:
        """All doors."""
        yield Door(self.name)
        for action in self.parser._actions:
            if action.dest == "help":
                continue
            door = self._door(action)
            yield door
            for choice in action.choices or BY_NAME.get(door.flag, ()):
                yield door._replace(choice=str(choice))

    def opened(self, words: Sequence[str]) -> Iterator[Door]:
        """The doors that a command line opens; `words` follow the command."""
        yield Door(self.name)
        for name, door in self.flags.items():
            if not name.startswith("-"):
                yield from _with_choices(door, words)
        for place, word in enumerate(words):
            if word in self.flags:
                yield from _with_choices(self.flags[word], words[place + 1 : place + 2])


def commands() -> dict[str, Command]:
    """All commands, by their words."""
    parsers = dict(_leaves(whole_parser(), ""))
    counts: Counter[tuple[str, str]] = Counter()
    for parser in parsers.values():
        counts.update(_flags(parser))
    return {
        name: Command(name, parser, frozenset(_repeated(parser, counts)))
        for name, parser in parsers.items()
    }


def _flags(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """The flags of a parser with their texts."""
    return [(_flag(action), _text(action)) for action in parser._actions if action.option_strings]


def _repeated(parser: argparse.ArgumentParser, counts: Counter[tuple[str, str]]) -> Iterator[str]:
    """The flags of a parser that another one has, with the same text."""
    return (flag for flag, text in _flags(parser) if counts[flag, text] > 1)


def _leaves(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for action in below:
        for word, chosen in action.choices.items():
            yield from _leaves(chosen, f"{name} {word}".strip())
    if not below:
        yield name, parser


def _flag(action: argparse.Action) -> str:
    """The name of a flag, and not its negation; of a positional argument its own."""
    longest = max(map(len, action.option_strings), default=0)
    names = (name for name in action.option_strings if name.startswith("--") or longest < 3)
    return next(names, action.dest)


def _text(action: argparse.Action) -> str:
    """The help of a flag without its default."""
    return re.sub(r" \(default.*", "", str(action.help), flags=re.DOTALL)


def _with_choices(door: Door, words: Sequence[str]) -> Iterator[Door]:
    yield door
    for word in words:
        yield door._replace(choice=_choice(door.flag, word))


def _choice(flag: str, word: str) -> str:
    """The choice that a word stands for: a class by the form of its name, a proposer by its method."""
    if flag == "--speculative-config":
        return str(json.loads(word)["method"])
    if flag in BY_NAME and is_class_name(word):
        return FILE if ".py:" in word else MODULE
    return word
