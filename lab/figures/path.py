"""The way of a request through the processes of a server. A diagram: it does not depend on the run."""

from typing import NamedTuple

from .svg import Drawing
from .tour import Tour

LANES = ("client", "front end", "engine", "device")
_WIDTH = 740
_TOP = 74
_ROW = 47


class Stage(NamedTuple):
    """A stage in one lane; an arrow leads to it from the lane before."""

    lane: int
    text: str
    is_repeated: bool = False  # for every iteration


STAGES = (
    Stage(0, "POST a chat"),
    Stage(1, "key and fields"),
    Stage(1, "text to ids"),
    Stage(1, "admission"),
    Stage(2, "wait in the pool"),
    Stage(2, "select requests", True),
    Stage(2, "plan pages", True),
    Stage(3, "run all layers", True),
    Stage(3, "sample tokens", True),
    Stage(2, "record results", True),
    Stage(1, "ids to text", True),
    Stage(0, "read an event", True),
)


def draw_path(tour: Tour) -> str:
    """Draw a lane for each process, and the stages from top to bottom."""
    height = _TOP + _ROW * len(STAGES) + 18
    title = "The way of a request: client, front end, engine, device, and back"
    drawing = Drawing(_WIDTH, height, title, "python -m lab.figures path")
    lane = _WIDTH / len(LANES)
    first = next(index for index, stage in enumerate(STAGES) if stage.is_repeated)
    loop = _TOP + _ROW * first - 5
    drawing.box(4, loop, _WIDTH - 8, height - loop - 8, "soft", edge="line", radius=8)
    drawing.text(14, loop + 24, "again in each iteration,", size=15, color="muted")
    drawing.text(14, loop + 44, "until the request ends", size=15, color="muted")
    for index, name in enumerate(LANES):
        drawing.text(lane * (index + 0.5), 30, name, size=19, anchor="middle", is_bold=True)
        where = ("", "process: HTTP, text", "process: ids only", "CPU, GPU or TPU")[index]
        drawing.text(lane * (index + 0.5), 52, where, size=15, color="muted", anchor="middle")
    for index, stage in enumerate(STAGES):
        _draw_stage(drawing, index, stage, lane)
    return str(drawing)


def _draw_stage(drawing: Drawing, index: int, stage: Stage, lane: float) -> None:
    x = lane * stage.lane + 5
    y = _TOP + _ROW * index
    if index:
        before = STAGES[index - 1]
        middle = lane * (before.lane + 0.5)
        if before.lane == stage.lane:
            drawing.arrow((middle, y - _ROW + 34), (middle, y))
        else:
            edge = x if stage.lane > before.lane else x + lane - 10
            drawing.line([(middle, y - _ROW + 34), (middle, y + 17)], color="muted")
            drawing.arrow((middle, y + 17), (edge, y + 17))
    drawing.box(x, y, lane - 10, 34, "page", edge="line", radius=6)
    drawing.text(x + 10, y + 23, str(index + 1), size=15, color="C", is_bold=True)
    drawing.text(x + 37, y + 23, stage.text, size=16)
