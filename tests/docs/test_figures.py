"""The drawn figures of the pages are current, and the sentences of docs/how_it_works.md are true of their run."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.figures.__main__ import FIGURES, PAPER
from lab.figures.paper import fed_tokens
from lab.figures.tour import BUDGET, Tour, take_tour
from tests.docs.pages import PAGES as ALL
from tests.docs.pages import links
from tests.docs.words import without_parts
from tests.project.source import ROOT

PAGES = dict.fromkeys(FIGURES, "docs/how_it_works.md") | dict.fromkeys(PAPER, "docs/paper.md")


@pytest.fixture(scope="module")
def tour() -> Tour:
    return take_tour()


def drawn(name: str, tour: Tour) -> str:
    return PAPER[name]() if name in PAPER else FIGURES[name](tour)


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_current(name: str, tour: Tour) -> None:
    written = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert written == drawn(name, tour), (
        f"run: python -m lab.figures {name} > docs/figures/{name}.svg"
    )


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_figures_are_in_their_page_with_their_commands(name: str, page: str, tour: Tour) -> None:
    assert f"figures/{name}.svg" in list(links(page))
    assert f"\n<!-- python -m lab.figures {name} > docs/figures/{name}.svg -->\n" in (
        ROOT / page
    ).read_text("utf-8")
    text = drawn(name, tour)
    root = ElementTree.fromstring(text)
    sizes = [
        int(text.get("font-size", "0")) for text in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert min(sizes) >= 13, "half of it would not be legible"
    used = {name for each in root.iter() for name in (each.get("class") or "").split()}
    light, dark = re.findall(
        r"<style>(.*?)@media \(prefers-color-scheme: dark\)\{(.*?)</style>", text
    )[0]
    assert all(f".{each}{{" in light and f".{each}{{" in dark for each in used)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(page for page in ALL if page.startswith("docs/"))]
)
def test_figures_have_their_commands(page: str) -> None:
    """In a comment, or the figure is in a part that a program writes with its command."""
    text = without_parts((ROOT / page).read_text(encoding="utf-8"))
    for figure in re.findall(r"!\[[^]]*\]\(([\w/.-]+\.svg)\)", text):
        assert re.search(rf"<!-- (?:python -m|orca-jax) .*{Path(figure).name} -->", text), (
            f"{page}: {figure}"
        )


def test_only_the_newest_token_goes_in_after_the_prompt() -> None:
    assert fed_tokens() == [(0, 2), (2, 3), (3, 4), (4, 5)]


def work(tour: Tour, name: str) -> dict[int, tuple[int, int]]:
    """The first position and the number of tokens of a request, by iteration from 1 on."""
    return {
        index: (part.start, part.tokens)
        for index, turn in enumerate(tour.turns, 1)
        for part in turn.parts
        if part.name == name
    }


def test_the_life_of_the_followed_request(tour: Tour) -> None:
    c = work(tour, "C")
    assert tour.turns[1].waiting == ["C"] and tour.turns[1].held == "budget"
    assert sum(part.tokens for part in tour.turns[1].parts) == BUDGET
    assert (c[3], c[4], c[5]) == ((4, 6), (10, 5), (15, 1))
    assert [
        part.is_sampling for turn in tour.turns[2:4] for part in turn.parts if part.name == "C"
    ] == [False, True]
    assert tour.turns[5].preempted == ["C"] and tour.turns[5].held == "pages"
    assert (c[12], c[13]) == ((8, 7), (15, 2)) and set(c) == {3, 4, 5, *range(12, 18)}
    assert [(part.name, part.start, part.tokens) for part in tour.turns[3].parts] == [
        ("A", 8, 1),
        ("B", 10, 1),
        ("C", 10, 5),
    ]
    assert set(work(tour, "D")) == {*range(13, 18)} and "D" in tour.turns[4].waiting


def test_the_pages_of_the_run(tour: Tour) -> None:
    pages = [turn.pages for turn in tour.turns]
    assert all(2 in each["B"] and 2 in each["C"] for each in pages[2:5])
    assert pages[4]["C"] == [2, 5, 6, 8] and "C" not in pages[5] and pages[5]["B"][-1] == 9
    assert pages[11]["C"][:2] == [2, 5] and 2 not in pages[11].get("B", [])
    assert all(
        name not in pages[end + 1] for name, end in tour.ends.items() if end + 1 < len(pages)
    )
