"""The pages of the documentation as data: links, anchors, code blocks and their marks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.project.source import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "checkpoints/*/README.md")
    for path in ROOT.glob(pattern)
)
SHELL = ("bash", "sh", "console", "")  # a block without a language is indented

_MARK = re.compile(r"<!-- not run: (.+?) -->\s*", re.DOTALL)
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code. `mark` is the reason for which no test runs it, from a comment above the block."""

    page: str
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def tokens(page: str) -> tuple[Token, ...]:
    """Parse a page."""
    return tuple(_PARSER.parse((ROOT / page).read_text(encoding="utf-8")))


def blocks(page: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    mark: str | None = None
    for token in tokens(page):
        if token.type in ("fence", "code_block") and token.map is not None:
            yield Block(page, token.map[0] + 1, token.info.split(" ")[0], token.content, mark)
        found = _MARK.fullmatch(token.content) if token.type == "html_block" else None
        mark = " ".join(found[1].split()) if found else None


def links(page: str) -> Iterator[str]:
    """Yield the targets of all links and pictures of a page."""
    for inline in _inline(page):
        for child in inline.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if target is not None:
                yield str(target)
    for token in tokens(page):
        if token.type == "html_block":
            yield from re.findall(r'(?:src|srcset|href)="([^"]+)"', token.content)


def code_spans(page: str) -> Iterator[str]:
    """Yield the pieces of code within the sentences and tables of a page."""
    for inline in _inline(page):
        yield from (child.content for child in inline.children or () if child.type == "code_inline")


@cache
def anchors(page: str) -> frozenset[str]:
    """Return the anchors of a page as repositories make them of its headings."""
    found: dict[str, int] = {}
    names = []
    for token, inline in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            text = "".join(
                child.content
                for child in inline.children or ()
                if child.type in ("text", "code_inline")
            )
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.append(f"{name}-{found[name]}" if name in found else name)
            found[name] = found.get(name, 0) + 1
    return frozenset(names)


def _inline(page: str) -> Iterator[Token]:
    return (token for token in tokens(page) if token.type == "inline")


def page_of(path: Path) -> str:
    """Return the name of a page in `PAGES`."""
    return path.resolve().relative_to(ROOT.resolve()).as_posix()
