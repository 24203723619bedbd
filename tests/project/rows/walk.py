"""A change that follows a row of "Files to touch": texts of files, and the tests that then pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """A change of one file: a text in place of another one, or a new file.

    Attributes:
        path: the file, relative to the root.
        text: the new text.
        old: the text that it replaces, which the file has once; empty: the file is new.
    """

    path: str
    text: str
    old: str = ""

    def apply(self, root: Path) -> None:
        """Make the change below `root`. Raises AssertionError if the file does not have the old text once."""
        path = root / self.path
        if not self.old:
            assert not path.exists(), f"{self.path} is there already"
            path.write_text(self.text, encoding="utf-8")
            return
        before = path.read_text(encoding="utf-8")
        assert before.count(self.old) == 1, f"{self.path} has not once: {self.old}"
        path.write_text(before.replace(self.old, self.text), encoding="utf-8")


def after(path: str, line: str, text: str) -> Edit:
    """A text after a line, or after several ones."""
    return Edit(path, f"{line}\n{text}", f"{line}\n")


class Walk(NamedTuple):
    """The edits of a row.

    Attributes:
        row: the first cell of the row.
        edits: the changes by hand.
        tests: the arguments of pytest for the tests that the row names.
        program: a program in Python that makes what another machine records.
    """

    row: str
    edits: Sequence[Edit]
    tests: Sequence[str]
    program: str = ""

    @property
    def files(self) -> set[str]:
        """The files that are edited, relative to the root."""
        return {edit.path for edit in self.edits}
