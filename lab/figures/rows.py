"""The tour by iteration: requests with their work, and pages with their holders."""

from itertools import chain

from .svg import Drawing
from .tour import BUDGET, FOLLOWED, NUM_PAGES, PAGE_SIZE, REQUESTS, Tour

_LEFT = 102
_CELL = 37
_RIGHT = 14


def _width(tour: Tour) -> float:
    return _LEFT + _CELL * len(tour.turns) + _RIGHT


def _axis(drawing: Drawing, tour: Tour, y: float) -> None:
    drawing.text(10, y, "iteration", size=15, color="muted")
    for index in range(len(tour.turns)):
        drawing.text(
            _LEFT + _CELL * (index + 0.5),
            y,
            str(index + 1),
            size=15,
            color="muted",
            anchor="middle",
        )


def draw_requests(tour: Tour) -> str:
    """Draw a row for each request and a column for each iteration."""
    top, row = 40, 46
    height = top + row * len(tour.names) + 142
    title = (
        "Four requests by iteration: waiting, prefill chunks, increments, a preemption, and ends"
    )
    drawing = Drawing(_width(tour), height, title, "python -m lab.figures requests")
    _axis(drawing, tour, 26)
    for place, asked in enumerate(REQUESTS):
        middle = top + row * (place + 0.5)
        if asked.name == FOLLOWED:
            drawing.box(4, middle - row / 2 + 1, _width(tour) - 8, row - 2, "soft", radius=6)
        drawing.text(12, middle - 1, asked.name, size=18, color=asked.name, is_bold=True)
        drawing.text(28, middle - 2, f"prompt {asked.prompt}", size=13, color="muted")
        drawing.text(28, middle + 13, f"output {asked.output}", size=13, color="muted")
        _draw_life(drawing, tour, asked.name, middle)
    y = top + row * len(tour.names) + 26
    drawing.text(10, y, "tokens", size=15, color="muted")
    for index, turn in enumerate(tour.turns):
        total = sum(part.tokens for part in turn.parts)
        drawing.text(_LEFT + _CELL * (index + 0.5), y, str(total), size=15, anchor="middle")
    drawing.text(10, y + 22, f"of each iteration; the budget is {BUDGET}", size=14, color="muted")
    _legend(drawing, y + 62)
    return str(drawing)


def _draw_life(drawing: Drawing, tour: Tour, name: str, middle: float) -> None:
    was_preempted = False
    for index, turn in enumerate(tour.turns):
        x = _LEFT + _CELL * index
        part = next((part for part in turn.parts if part.name == name), None)
        was_preempted = name in turn.preempted or (was_preempted and part is None)
        if part is not None:
            _draw_work(drawing, name, x, middle, part.tokens, is_increment=part.is_increment)
        elif name in turn.waiting:
            dashes = "5 4" if was_preempted else None
            drawing.line(
                [(x, middle), (x + _CELL, middle)],
                color=name if was_preempted else "muted",
                dashes=dashes,
            )
        if tour.ends[name] == index:
            drawing.diamond(x + _CELL, middle, 7)


def _draw_work(
    drawing: Drawing, name: str, x: float, middle: float, tokens: int, *, is_increment: bool
) -> None:
    inset, half = (9, 10) if is_increment else (2, 17)
    drawing.box(
        x + inset,
        middle - half,
        _CELL - 2 * inset,
        2 * half,
        name,
        radius=10 if is_increment else 4,
    )
    drawing.text(
        x + _CELL / 2, middle + 6, str(tokens), size=16, color="ink", anchor="middle", is_bold=True
    )


def _legend(drawing: Drawing, y: float) -> None:
    _draw_work(drawing, FOLLOWED, 10, y, 6, is_increment=False)
    drawing.text(54, y + 5, "prefill (initiation): tokens of a chunk", size=15)
    _draw_work(drawing, FOLLOWED, 350, y, 1, is_increment=True)
    drawing.text(394, y + 5, "increment: one token", size=15)
    drawing.diamond(580, y, 7)
    drawing.text(596, y + 5, "end", size=15)
    drawing.line([(10, y + 34), (48, y + 34)], color="muted")
    drawing.text(54, y + 39, "waiting for admission", size=15)
    drawing.line([(350, y + 34), (388, y + 34)], color=FOLLOWED, dashes="5 4")
    drawing.text(394, y + 39, "preempted, waiting again", size=15)


def draw_pages(tour: Tour) -> str:
    """Draw a row for each page of the KV cache and a column for each iteration; a shared page has two colours."""
    top, row = 40, 24
    height = top + row * NUM_PAGES + 66
    title = "Pages of the KV cache by iteration, in the colours of the requests that hold them"
    drawing = Drawing(_width(tour), height, title, "python -m lab.figures pages")
    _axis(drawing, tour, 26)
    for page in range(NUM_PAGES):
        y = top + row * page
        drawing.text(12, y + 17, f"page {page}", size=14, color="muted")
        for index, turn in enumerate(tour.turns):
            x = _LEFT + _CELL * index
            holders = [name for name, pages in turn.pages.items() if page in pages]
            drawing.box(x + 1, y + 1, _CELL - 2, row - 2, "soft", radius=2)
            for place, name in enumerate(holders):
                part = (_CELL - 2) / len(holders)
                drawing.box(x + 1 + part * place, y + 1, part, row - 2, name, radius=2)
                drawing.text(
                    x + 1 + part * (place + 0.5),
                    y + 17,
                    name,
                    size=14,
                    color="ink",
                    anchor="middle",
                    is_bold=True,
                )
    y = top + row * NUM_PAGES + 22
    drawing.text(10, y, "free", size=15, color="muted")
    for index, turn in enumerate(tour.turns):
        free = NUM_PAGES - len(set(chain.from_iterable(turn.pages.values())))
        drawing.text(_LEFT + _CELL * (index + 0.5), y, str(free), size=15, anchor="middle")
    drawing.text(
        10,
        y + 26,
        f"A page holds {PAGE_SIZE} tokens. Two letters: a page of the prefix cache, shared.",
        size=14,
        color="muted",
    )
    return str(drawing)
