"""The pages stay short enough to be read, and a measured number of the README has one source."""

import re

import pytest

from lab.pages.command import ROOT
from tests.docs.pages import PAGES
from tests.docs.words import by_page, without_parts

MAX_WORDS = 36_000  # written by hand below docs/; lower it when pages become shorter
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
_MARKS = re.compile(r"<!--.*?-->", re.DOTALL)
_BEGIN = r"(?<![\w.,-])(?<!Python )"
# A decimal number of three digits or more, as measurements have, but not a version of Python; or one with a unit.
_NUMBER = re.compile(_BEGIN + r"(?:\d[\d,]*\.\d{2,}|\d[\d,]+\.\d+)(?!\w|\.\d)")
_MEASURED = re.compile(
    _BEGIN
    + r"(\d[\d,]*(?:\.\d+)?)(?:\sto\s(\d[\d,]*(?:\.\d+)?))?\s(times|%|ms|us|tokens/s|requests/s)(?!\w)"
)


def numbers(text: str) -> set[str]:
    """Return the numbers of a text that look measured: with decimals, or with a unit, both ends of a range."""
    text = _CODE.sub("", text)
    ranges = (match for match in _MEASURED.finditer(text))
    return set(_NUMBER.findall(text)) | {
        f"{end} {match[3]}" for match in ranges for end in match.groups()[:2] if end
    }


def both(written: str, pages: dict[str, str]) -> set[tuple[str, str]]:
    """Return the numbers written by hand in a text that other pages have too, by hand or by a program."""
    others = {name: numbers(_MARKS.sub("", page)) for name, page in pages.items()}
    mine = numbers(without_parts(written))
    return {(number, name) for number in mine for name, found in others.items() if number in found}


def test_the_words_written_by_hand_are_few() -> None:
    assert sum(by_page().values()) <= MAX_WORDS, (
        "python -m tests.docs.words shows the words of each page"
    )


def test_a_number_of_the_readme_is_written_by_a_program_or_stands_alone() -> None:
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    assert not both(texts.pop("README.md"), texts), (
        "write it from a JSON between markers (lab/pages/command.py), or once"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "It has 1.5\nto 2 times, and 12 % of 1,234.5 or 0.62.",
            {"1.5 times", "2 times", "12 %", "1,234.5", "0.62"},
        ),
        ("Python 3.12, version 1.2.34, `7.25`, [a](b#1.23), at 3, 8 devices", set()),
        ("38.7<!-- end --> times", {"38.7"}),
    ],
)
def test_measured_numbers(text: str, found: set[str]) -> None:
    assert numbers(text) == found


@pytest.mark.parametrize(
    "other", ["1.5 times", "| <!-- from lab: a .1f -->1.5<!-- end --> times |", "1.5 to 9 times"]
)
def test_a_number_of_two_pages_is_found(other: str) -> None:
    assert both("It is 1.5 times as fast.", {"other": other}) == {("1.5 times", "other")}
    assert not both("<!-- from lab: a .1f -->1.5<!-- end --> times, and 2 times", {"other": other})


def test_parts_of_programs_are_left_out() -> None:
    text = "1.1 <!-- from lab: a .1f -->2.2<!-- end --> <!-- begin: b -->\n3.3\n<!-- end: b --> 4.4"
    assert without_parts(text).split() == ["1.1", "4.4"]
