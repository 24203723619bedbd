"""Command lines of the documentation, read by the parsers of the programs that they start."""

import argparse
import dataclasses
import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

from orca_jax.cli.main import SUBCOMMANDS
from orca_jax.flags import flag_of
from tests.project.source import ROOT

MODULES = {found.module.removesuffix(".__main__") for found in SUBCOMMANDS.values()}
OTHERS = frozenset(
    """cat cd claude cline cp curl docker done echo export gcloud git helm hf kubectl ln mkdir npm open-webui pip printf
    qwen rm serve sh sleep truncate until uv""".split()  # noqa: SIM905
)
_PYTHON = re.compile(r"(?:\.venv/bin/)?python3?(?:\.\d+)?$")
_SETTING = re.compile(r"[A-Z_]+=\S*$")
NEWLINE = "\u2424"
_ENDS = frozenset("();|&")  # and runs of these
_FILES = frozenset({">", ">>", "<"})


class _ParsedError(BaseException):
    """The flags are right; the program is not run."""


def commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell block, without settings of variables, `time` and redirections."""
    lexer = shlex.shlex(
        text.replace("\\\n", " ").replace("\n", f" {NEWLINE} "),
        posix=True,
        punctuation_chars="();<>|&",
    )
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    in_comment = is_file = False
    for word in [*lexer, NEWLINE]:
        in_comment = word != NEWLINE and (in_comment or word.startswith("#"))
        if word == NEWLINE or set(word) <= _ENDS:
            while words and (_SETTING.match(words[0]) or words[0] in ("time", "do")):
                words = words[1:]
            if words:
                yield words
            words = []
        elif not (in_comment or is_file or word in _FILES):
            words.append(word)
        is_file = word in _FILES


def check(command: Sequence[str]) -> None:
    """Parse a command by its program. A program of another project has only to be known.

    Raises:
        AssertionError: the program, its file or a flag does not exist.
    """
    first, *rest = command
    first = first.removeprefix("./").removeprefix(".venv/bin/")
    if _PYTHON.match(command[0]):
        _check_python(rest)
    elif first == "orca-jax":
        if rest[0] not in ("--help", "--version"):
            parse(SUBCOMMANDS[rest[0]].module, rest[1:])
    elif first == "scripts/serve":
        parse("orca_jax.serve", rest)
    elif (ROOT / first).is_file():
        _check_flags(ROOT / first, rest)
    else:
        assert first in OTHERS, f"unknown program: {first}"


def parse(module: str, words: Sequence[str]) -> None:
    """Parse the flags of a module with a function `main`, and stop there. Raises AssertionError."""
    file = ROOT / module.replace(".", "/")
    program = importlib.import_module(f"{module}.__main__" if file.is_dir() else module)
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: object, **options: object) -> None:
        parse_args(self, words)
        raise _ParsedError

    with (
        mock.patch.object(sys, "argv", [module, *words]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
    ):
        try:
            program.main()
        except _ParsedError:
            return
        except SystemExit as end:  # of `--help`, or of an error, which is on standard error
            assert not end.code, f"{module} {shlex.join(words)}"
            return
    raise AssertionError(f"{module} has read no flags")


def _check_python(words: list[str]) -> None:
    match words:
        case ["-m", "pytest", *paths]:
            assert all((ROOT / path).exists() for path in paths if path.startswith("tests/"))
        case ["-m", "venv" | "pip", *_] | ["-c", _]:
            pass
        case ["-m", "orca_jax", *rest]:
            check(["orca-jax", *rest])
        case ["-m", module, *rest] if module.startswith("orca_jax") or module == "lab":
            parse(module, rest)
        case ["-m", module, *rest]:
            path = ROOT / module.replace(".", "/")
            _check_flags(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"), rest)
        case [script, *rest]:
            _check_flags(ROOT / script, rest)


def _check_flags(script: Path, words: Sequence[str]) -> None:
    """Check that a script of our own exists, and that its source has the flags."""
    assert script.is_file(), script
    text = script.read_text(encoding="utf-8")
    if script.suffix == ".py":
        missing = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
        assert not missing, f"{script.name}: {missing}"


@cache
def known_flags() -> frozenset[str]:
    """Return the flags of all programs of the package and of its scripts."""
    from orca_jax.cli.completion import whole_parser
    from orca_jax.tools.deploy.ray_serve import RayConfig

    found = {flag_of(field.name) for field in dataclasses.fields(RayConfig)}
    for script in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]:
        found |= set(re.findall(r'"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    waiting = [whole_parser()]
    while waiting:
        for action in waiting.pop()._actions:
            found |= {option for option in action.option_strings if option.startswith("--")}
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    return frozenset(found)
