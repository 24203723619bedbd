"""Links of the documentation: files and anchors exist. Addresses of other hosts are not tried."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.arena import build as arena
from scripts.flags_page import actions
from scripts.website.__main__ import DOCS, build
from scripts.website.pages import indexed, navigation, relinked, themed
from tests.arena.built import stand_in
from tests.docs.pages import PAGES, anchors, code_spans, links, page_of
from tests.project.source import ROOT, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OF_MYST = pytest.mark.filterwarnings("ignore:.myst_parser.* is deprecated")  # by a newer Sphinx


def test_addresses_of_the_project_are_those_of_its_settings() -> None:
    """Another owner: `git grep -l OWNER/orca-jax | xargs sed -i s,OWNER/orca-jax,me/orca-jax,`; so with the image."""
    texts = [*PAGES, "scripts/website/pages.py", "examples/orca_jax_colab.ipynb"]
    texts += [str(path.relative_to(ROOT)) for path in (ROOT / "deploy").rglob("*.yaml")]
    found = [(name, (ROOT / name).read_text(encoding="utf-8")) for name in texts]
    repositories = {
        url
        for name, text in found
        for url in re.findall(r"https://github\.com/[\w.-]+/orca-jax", text)
    }
    images = {
        image for name, text in found for image in re.findall(r"image: ([\w./-]+/orca-jax)\b", text)
    }
    assert repositories == {PROJECT["project"]["urls"]["Repository"]}
    assert images == {PROJECT["tool"]["orca-jax"]["image"]}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(page_of(path)), f"{page}: {link}"


def test_pages_that_the_code_names_exist() -> None:
    named: dict[str, set[str]] = {}
    for file in python_files("orca_jax", "lab", "scripts", "tests"):
        for page, heading in re.findall(
            r'(?<![\w/])(docs/[\w/-]+\.md)(?:,\s+"([A-Z][^"\n]+)")?', file.text
        ):
            named.setdefault(page, set()).update({heading} - {""})
    assert len(named) > 10 and {*named} - {"docs/gguf.md"} <= {*PAGES}  # a page of ggml
    headings = {
        page: set(re.findall(r"(?m)^#+ (.+)$", (ROOT / page).read_text("utf-8")))
        for page in named
        if page in PAGES
    }
    assert not {
        (page, each)
        for page, found in named.items()
        for each in found
        if each not in headings.get(page, ())
    }


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("checkpoints/")])
def test_files_that_pages_name_exist(page: str) -> None:
    """Paths with a folder, below the root, the package, its kernels or those of attention."""
    bases = [
        ROOT / base
        for base in (".", "orca_jax", "orca_jax/kernels", "orca_jax/kernels/ragged_attention")
    ]
    bases.append(ROOT / "tests")  # of conformance.md
    for span in code_spans(page):
        for path in re.findall(r"^(?:[\w-]+/)+[\w-]+\.py\b", span):
            assert "NAME" in path or any((base / path).is_file() for base in bases), (
                f"{page}: {path}"
            )


def test_every_page_is_in_the_navigation() -> None:
    listed = [
        page
        for pages in navigation((DOCS / "index.md").read_text(encoding="utf-8")).values()
        for page in pages
    ]
    assert sorted(f"docs/{page}.md" for page in [*listed, "index"]) == [
        p for p in PAGES if p.startswith("docs/")
    ]


@pytest.mark.parametrize(
    ("file", "link", "expected"),
    [
        ("docs/deployment.md", "operations.md#settings", "operations.md#settings"),
        ("docs/measured/cycles.md", "../kernels.md", "../kernels.md"),
        ("docs/deployment.md", "../deploy", "https://github.com/OWNER/orca-jax/tree/main/deploy"),
        ("docs/deployment.md", "../README.md", "index.md"),
        ("docs/deployment.md", "https://example.com/a", "https://example.com/a"),
        ("docs/deployment.md", "../nowhere.txt", "../nowhere.txt"),
    ],
)
def test_links_in_the_site(file: str, link: str, expected: str) -> None:
    assert relinked(f"[a]({link})", ROOT / file, ROOT / file) == f"[a]({expected})"


def test_links_of_a_page_that_lies_elsewhere() -> None:
    text = relinked(
        "[a](docs/api.md#x) [b](LICENSE)", ROOT / "CONTRIBUTING.md", DOCS / "contributing.md"
    )
    assert text == "[a](api.md#x) [b](https://github.com/OWNER/orca-jax/blob/main/LICENSE)"


def test_pictures_follow_the_theme() -> None:
    dark = '<source media="(prefers-color-scheme: dark)" srcset="b.png">'
    text = themed(f'<picture>\n  {dark}\n  <img alt="x" src="a.png">\n</picture>')
    assert (
        text
        == '<img class="only-light" alt="x" src="a.png"><img class="only-dark" alt="x" src="b.png">'
    )


@pytest.mark.slow
@OF_MYST
def test_the_site_builds_and_needs_no_other_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(tmp_path / "site", tmp_path / "cache") == 0
    monkeypatch.setattr(arena, "DIGEST", stand_in(tmp_path / "kept"))
    arena.add_arena(tmp_path / "site" / "arena", tmp_path / "kept")
    for page in tmp_path.glob("site/**/*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|source|iframe)[^>]*\ssrc(?:set)?="([^"]+)"', text)
        loaded += re.findall(r'<link rel="(?:stylesheet|preload|icon)"[^>]*href="([^"]+)"', text)
        # the page of a timeline has style, script and data in it
        is_whole = page.name == "burst.html"
        assert bool(loaded) is not is_whole and not [
            address for address in loaded if "//" in address
        ], page.name
        for address in loaded:
            assert (page.parent / re.split("[?#]", address)[0]).exists(), f"{page.name}: {address}"


@pytest.mark.slow
@OF_MYST
@pytest.mark.parametrize(
    "fault", ["[a](nowhere.md)", "[a](deployment.md#nowhere)", "![a](nowhere.svg)"]
)
def test_the_build_refuses_a_broken_link(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("deployment.md", "contributing.md"):
        shutil.copy(DOCS / name, docs)
    listed = "# Site\n\n## Pages\n\n- [a](deployment.md)\n- [b](contributing.md)\n"
    (docs / "index.md").write_text(f"{listed}\n{fault}\n", encoding="utf-8")
    assert build(tmp_path / "site", tmp_path / "cache", docs) != 0
    assert "nowhere" in capfd.readouterr().err


SEARCH = """
const fs = require("fs"), vm = require("vm"), folder = process.argv[1];
const none = { addEventListener() {}, getElementById: () => null };
const context = { document: none, window: { addEventListener() {} }, console, Intl, URLSearchParams };
vm.createContext(context);
const read = (name) => vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf-8"), context);
vm.runInContext("var _ready = () => {}, _ = (text) => text;", context);
vm.runInContext("var Stemmer = class { stemWord(word) { return word; } };", context);
read("_static/language_data.js");
read("_static/searchtools.js");
vm.runInContext("var localStorage = { setItem() {} }, SPHINX_HIGHLIGHT_ENABLED = false;", context);
read("searchindex.js");
const first = (name) => {
  context.name = name;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(name))", context);
  return found.length ? found[found.length - 1][0] : null;
};
console.log(JSON.stringify(JSON.parse(process.argv[2]).map(first)));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="the search of the site is JavaScript")
def test_a_search_for_a_flag_shows_the_page_of_flags_first(tmp_path: Path) -> None:
    make = [sys.executable, "-m", "scripts.website", "build", "--no-arena"]
    make += ["--out", str(tmp_path / "site")]
    subprocess.run(make, cwd=ROOT, check=True)
    flags = [name for _, found in actions() for flag in found for name in flag.option_strings]
    words = [*flags, *(flag.lstrip("-") for flag in flags if "-" in flag.lstrip("-"))]
    command = ["node", "-e", SEARCH, str(tmp_path / "site"), json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(zip(words, json.loads(done.stdout), strict=True))
    assert {word: page for word, page in found.items() if page != "flags"} == {}


def test_flags_are_entries_of_the_index() -> None:
    text = indexed("| `--max-loras`, `-m` | adapters |\n")
    assert "   ! single: --max-loras\n   ! single: max-loras\n   ! single: -m\n" in text
