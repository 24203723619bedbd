"""One iteration of the tour: selective batching, as in Figure 5 of the paper."""

from .svg import Drawing
from .tour import PAGE_SIZE, Part, Tour, Turn

ITERATION = 3
_WIDTH = 740
_LEFT = 20
_CELL = 46


def draw_batch(tour: Tour) -> str:
    """Draw the merged tokens, attention by request with its pages, and the sampled tokens."""
    turn = tour.turns[ITERATION]
    drawing = Drawing(_WIDTH, 508, "The merged batch of one iteration: only attention is split by request",
                      "python -m lab.figures batch")  # fmt: skip
    tokens: list[tuple[str, int]] = []
    for part in turn.parts:
        tokens += [(part.name, part.start + index) for index in range(part.tokens)]
    drawing.text(
        _LEFT,
        30,
        f"Iteration {ITERATION + 1}: {len(tokens)} tokens of {len(turn.parts)} requests",
        size=18,
        is_bold=True,
    )
    _strip(drawing, tokens, 46)
    _step(drawing, 100, "norm, Q K V, for all tokens at once")
    y = 166.0
    for part in turn.parts:
        _attend(drawing, part, turn, y)
        y += 62
    drawing.line([(_LEFT, 158), (_LEFT, y - 16)], color="muted", width=3)
    _step(drawing, y + 2, "output projection and MLP, for all tokens at once")
    _strip(drawing, tokens, y + 52)
    drawing.text(_LEFT, y + 126, "After the last layer, one next token for each request:", size=16)
    for place, part in enumerate(part for part in turn.parts if part.is_sampling):
        x = 470 + 88 * place
        drawing.box(x, y + 104, 76, 32, part.name, radius=10)
        drawing.text(
            x + 38,
            y + 126,
            f"{part.name}{part.start + part.tokens}",
            color="ink",
            anchor="middle",
            is_bold=True,
        )
    return str(drawing)


def _strip(drawing: Drawing, tokens: list[tuple[str, int]], y: float) -> None:
    for index, (name, position) in enumerate(tokens):
        x = _LEFT + _CELL * index
        drawing.box(x + 1, y, _CELL - 2, 36, name)
        drawing.text(
            x + _CELL / 2,
            y + 24,
            f"{name}{position}",
            size=15,
            color="ink",
            anchor="middle",
            is_bold=True,
        )
    drawing.text(
        _LEFT + _CELL * len(tokens) + 12, y + 24, "request and position", size=14, color="muted"
    )


def _step(drawing: Drawing, y: float, text: str) -> None:
    drawing.box(_LEFT, y, _WIDTH - 2 * _LEFT, 36, "soft", edge="line", radius=6)
    drawing.text(_WIDTH / 2, y + 24, text, anchor="middle")


def _attend(drawing: Drawing, part: Part, turn: Turn, y: float) -> None:
    """Draw one request: its queries, and its context in pages."""
    pages = turn.pages[part.name]
    context = part.start + part.tokens
    queries = f"{part.tokens} queries" if part.tokens > 1 else "1 query"
    drawing.text(_LEFT + 14, y + 16, f"attention of {part.name}", color=part.name, is_bold=True)
    drawing.text(_LEFT + 14, y + 36, f"{queries}, {context} keys", size=14, color="muted")
    slot, x = 25, 180.0
    for index, page in enumerate(pages):
        for place in range(PAGE_SIZE):
            position = index * PAGE_SIZE + place
            if position < context:
                rise = 8 if position >= part.start else 0  # of this iteration
                drawing.box(x + slot * place, y + 16 - rise, slot - 2, 22 + rise, part.name)
            else:
                drawing.box(x + slot * place, y + 16, slot - 2, 22, "soft", edge="line")
        drawing.text(x, y + 4, f"page {page}", size=14, color="muted")
        x += slot * PAGE_SIZE + 12
