"""The words of the documentation that are written by hand: `python -m tests.docs.words` prints them by page.

Left out are pages and parts that a program writes: it names itself at the top of such a page, or in the marks around
such a part.
"""

import re

from tests.docs.pages import PAGES
from tests.project.source import ROOT

GENERATED = ("docs/api.md", "docs/conformance.md", "docs/models.md", "docs/peers.md")
_PARTS = re.compile(r"<!-- (?:from lab|begin): .*?<!-- end.*?-->", re.DOTALL)
# the rows of tables below docs/measured, written by tests/aot
_MEASURED = re.compile(r"^\|.*\n?", re.MULTILINE)


def without_parts(text: str) -> str:
    """Return the text of a page without the parts that a program writes."""
    return _PARTS.sub("", text)


def by_hand(page: str) -> int:
    """Return the number of words of a page, as `wc -w` counts them, without the parts that a program writes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.startswith("docs/measured/"):
        text = _MEASURED.sub("", text)
    return len(without_parts(text).split())


def by_page() -> dict[str, int]:
    """Return the words of each page below `docs/` that is written by hand."""
    return {
        page: by_hand(page) for page in PAGES if page.startswith("docs/") and page not in GENERATED
    }


if __name__ == "__main__":
    for page, words in sorted(by_page().items(), key=lambda found: found[1]):
        print(f"{words:7,} {page}")
    print(f"{sum(by_page().values()):7,} in all")
