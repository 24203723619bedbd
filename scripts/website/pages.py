"""An extension of Sphinx that reads the pages of `docs/` as a repository shows them.

- The navigation is that of `index.md`: a heading with the pages of its list. A page in no list is an error.
- `contributing.md` and `changelog.md` stand for files at the root of the repository.
- Links out of `docs/` lead to the repository.
- A `<picture>` with a dark form follows the theme of the site.
- `how_it_works.md` ends with a recorded burst that plays, and `arena.md` with the arena.
- Each flag in a table of `flags.md` is an entry of the index, so a search for its name finds this page first.
"""

import os
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/OWNER/orca-jax"
WHOLE = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
PAGES = {ROOT / name: DOCS / f"{page}.md" for page, name in WHOLE.items()} | {
    ROOT / "README.md": DOCS / "index.md"
}

RECORDED = Path(__file__).parent / "burst.jsonl"
PLAYED = """
## A recorded burst

Sixteen requests, and room for eight of them. Each row is a request, each column one pass through the model. A finished
request leaves at once; the next takes its place.

```{raw} html
<iframe class="played" src="burst.html#play" title="A recorded burst" loading="lazy"></iframe>
```
"""

ARENA = """
```{raw} html
<p class="alone"><a href="arena/index.html">The arena in a window of its own</a></p>
<iframe class="played arena" src="arena/index.html" title="The arena" loading="lazy"></iframe>
```
"""

_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ITEM = re.compile(r"^ *- \[[^]]+\]\(([\w/-]+)\.md[^)]*\)", re.MULTILINE)
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
_FLAG = re.compile(r"^\| (`-[^|]+`) \|", re.MULTILINE)


def navigation(index: str) -> dict[str, list[str]]:
    """Return the pages below each heading of the index, each page once."""
    seen: set[str] = set()
    parts: dict[str, list[str]] = {}
    texts = _HEADING.split(index)[1:]
    for title, text in zip(texts[::2], texts[1::2], strict=True):
        pages = [page for page in dict.fromkeys(_ITEM.findall(text)) if page not in seen]
        seen.update(pages)
        if pages:
            parts[title] = pages
    return parts


def toctrees(index: str) -> str:
    """Return the directives of the navigation."""
    parts = navigation(index).items()
    return "\n".join(
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in parts
    )


def relinked(text: str, file: Path, page: Path) -> str:
    """Return a text of `file` with its relative links as they are in `page`; those out of `docs/` are addresses."""

    def replace(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = Path(os.path.normpath(file.parent / target))
        if "://" in target or not path.is_relative_to(ROOT):
            return match[0]
        path = PAGES.get(path, path)
        if path.is_relative_to(DOCS):
            return f"{before}{os.path.relpath(path, page.parent)}{after}"
        kind = "tree" if path.is_dir() else "blob"
        return (
            f"{before}{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}{after}"
            if path.exists()
            else match[0]
        )

    return _LINK.sub(replace, text)


def themed(text: str) -> str:
    """Return a text whose pictures follow the theme of the site instead of that of the system."""
    return _PICTURE.sub(
        r'<img class="only-light" alt="\2" src="\3"><img class="only-dark" alt="\2" src="\1">', text
    )


def indexed(text: str) -> str:
    """Return the text of `flags.md` with main entries of the index, which a search shows before all other pages."""
    groups = [found.split(",") for found in _FLAG.findall(text)]
    flags = [flag.strip("` ") for flag in chain.from_iterable(groups)]
    spellings = dict.fromkeys(chain.from_iterable(map(_spellings, flags)))
    entries = "\n".join(f"   ! single: {name}" for name in spellings)
    return f"{text}\n```{{eval-rst}}\n.. index::\n{entries}\n```\n"


def _spellings(flag: str) -> list[str]:
    """Return a flag, and its name without dashes before it unless that is a word of its own, such as `model`."""
    bare = flag.lstrip("-")
    return [flag, bare] if "-" in bare else [flag]


def _read(app: "Sphinx", name: str, source: list[str]) -> None:
    page = file = Path(app.srcdir) / f"{name}.md"
    if name in WHOLE:
        file = ROOT / WHOLE[name]
        source[0] = file.read_text(encoding="utf-8")
        app.env.note_dependency(str(file))
    source[0] = themed(relinked(source[0], file, page))
    if name == "flags":
        source[0] = indexed(source[0])
    if name == "arena":
        source[0] += ARENA
    if name == "how_it_works":
        source[0] += PLAYED
    if name == "index":
        source[0] += "\n" + toctrees(source[0])


def _add_files(app: "Sphinx", config: Any) -> None:
    from orca_jax.timeline.html import html_page
    from orca_jax.timeline.read import load_timeline

    page = Path(app.doctreedir) / "burst.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html_page(load_timeline(str(RECORDED))), encoding="utf-8")
    config.html_extra_path = [
        str(path) for path in (*sorted(Path(app.srcdir).glob("playground*.png")), page)
    ]


def setup(app: "Sphinx") -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("config-inited", _add_files)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
