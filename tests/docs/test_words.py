"""The pages stay short enough to be read, and a measured number of the README has one source."""

import re

from lab.pages import ROOT
from tests.docs.words import by_page, without_parts

MAX_WORDS = 42_600  # written by hand below docs/; lower it when pages become shorter, towards 38,000
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
# A decimal number of three digits or more, as measurements have, but not a version of Python.
_NUMBER = re.compile(r"(?<![\w.-])(?<!Python )(?:\d+\.\d{2,}|\d{2,}\.\d+)(?!\w|\.\d)")


def numbers(page: str) -> set[str]:
    """Return the decimal numbers of a page's prose and tables that no program writes."""
    return set(_NUMBER.findall(_CODE.sub("", without_parts((ROOT / page).read_text(encoding="utf-8")))))


def test_the_words_written_by_hand_are_few() -> None:
    assert sum(by_page().values()) <= MAX_WORDS, "python -m tests.docs.words shows the words of each page"


def test_a_number_of_the_readme_is_written_by_a_program_or_stands_alone() -> None:
    others = {page: numbers(page) for page in by_page()}
    twice = {(number, page) for number in numbers("README.md") for page, found in others.items() if number in found}
    assert not twice, "write it from a JSON between markers (lab/pages.py), or on one page alone"


def test_parts_of_programs_are_left_out() -> None:
    text = "1.1 <!-- from lab: a .1f -->2.2<!-- end --> <!-- begin: b -->\n3.3\n<!-- end: b --> 4.4"
    assert without_parts(text).split() == ["1.1", "4.4"]
