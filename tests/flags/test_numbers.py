"""A flag for numbers has the type of its default, and its help ends with the default."""

import argparse
from collections.abc import Sequence

import pytest

from orca_jax.flags import add_number


@pytest.mark.parametrize(
    ("default", "shown", "words", "value"),
    [
        (3, "3", ["7"], 7),
        (1800.0, "1800", ["0.5"], 0.5),
        (0.25, "0.25", ["2"], 2.0),
        (1_000_000, "1000000", ["8"], 8),
    ],
)
def test_a_number(default: float, shown: str, words: list[str], value: float) -> None:
    parser = argparse.ArgumentParser()
    add_number(parser, "--size", default, "its size")
    assert f"its size (default: {shown})" in " ".join(parser.format_help().split())
    assert parser.parse_args([]).size == default
    given = parser.parse_args(["--size", *words]).size
    assert given == value
    assert type(given) is type(default)


@pytest.mark.parametrize("default", [[64, 256], [0.5, 1.0]])
def test_several_numbers(default: Sequence[float]) -> None:
    parser = argparse.ArgumentParser()
    add_number(parser, "--load", default, "loads", nargs="+", metavar="X")
    shown = " ".join(f"{number:g}" for number in default)
    help_text = " ".join(parser.format_help().split())
    assert "--load X [X ...]" in help_text
    assert f"loads (default: {shown})" in help_text
    assert parser.parse_args([]).load == default
    assert parser.parse_args(["--load", "1", "2"]).load == [1, 2]


def test_a_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_number(parser, "--size", 3, "its size")
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "0.5"])
    assert "argument --size: invalid int value: '0.5'" in capsys.readouterr().err
