"""Counterparts of the paper's Figures 1(a), 2, 6 and 7, as this engine does the same."""

from collections.abc import Mapping
from typing import NamedTuple

from orca_jax.assembly.engine import build_engine
from orca_jax.model.describe import read_model_config
from orca_jax.model.stages import spans
from orca_jax.sched.observer import Observer
from orca_jax.sched.pool import RequestPool
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import ExecutorStats, StepPlan

from .svg import Drawing

_WIDTH = 740
WORDS = ("the", "sky", "is", "blue", "today", "end")
NUM_PROMPT, NUM_OUTPUT = 2, 4
STAGES, SHARDS = 3, 2  # as in the paper's Figure 6
_MODEL = "preset:distilgpt2"  # six layers


class Fed(NamedTuple):
    """The tokens that go into one iteration, by their positions."""

    start: int
    stop: int


class _Inputs(Observer):
    def __init__(self) -> None:
        self.fed: list[Fed] = []

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        (member,) = plan.members
        self.fed.append(Fed(member.start, member.start + member.num_tokens))


def fed_tokens() -> list[Fed]:
    """The inputs of a request's iterations under `orca`, from a run on the toy model."""
    inputs = _Inputs()
    config = EngineConfig("preset:toy", scheduler="orca", max_model_len=16, progress=False)
    with build_engine(config) as built, built.engine.observed_by(inputs):
        built.engine.add_request(
            "A", range(NUM_PROMPT), SamplingParams(NUM_OUTPUT, temperature=0.0, ignore_eos=True)
        )
        while built.engine.has_work:
            built.engine.step()
    return inputs.fed


def _drawing(height: float, title: str, name: str) -> Drawing:
    return Drawing(_WIDTH, height, title, f"python -m lab.figures {name}")


def _labelled(
    drawing: Drawing, x: float, y: float, size: tuple[float, float], text: str, fill: str = "soft"
) -> None:
    drawing.box(x, y, *size, fill, edge="line" if fill in ("soft", "page") else None, radius=6)
    color = "text" if fill in ("soft", "page") else "ink"
    drawing.text(x + size[0] / 2, y + size[1] / 2 + 6, text, color=color, anchor="middle", size=15)


def draw_increments() -> str:
    """Draw Figure 1(a): the tokens into and out of each iteration, and the keys and values between them."""
    drawing = _drawing(
        356,
        "A request by iteration: the prompt goes in once, then the newest token alone",
        "increments",
    )
    column, left = 178, 24
    for index, fed in enumerate(fed_tokens()):
        x = left + column * index
        kind = "initiation phase" if fed.start == 0 else "increment phase"
        drawing.text(x + 66, 26, f"iteration {index + 1}", anchor="middle", is_bold=True)
        drawing.text(x + 66, 46, kind, size=14, color="muted", anchor="middle")
        _labelled(drawing, x + 33, 66, (66, 34), WORDS[fed.stop], "A")
        for layer, y in ((2, 130), (1, 194)):
            _labelled(drawing, x, y, (132, 40), f"layer {layer}")
            drawing.arrow((x + 66, y), (x + 66, y - (29 if layer == 2 else 23)))
            if fed.stop < NUM_PROMPT + NUM_OUTPUT - 1:
                drawing.arrow((x + 132, y + 20), (x + column, y + 20), color="C")
        count = fed.stop - fed.start
        width = 62
        for place in range(count):
            at = x + 66 + width * (place - count / 2) + 2
            name = "A" if fed.start else "B"
            _labelled(drawing, at, 262, (width - 4, 34), WORDS[fed.start + place], name)
            drawing.arrow((at + width / 2 - 2, 262), (at + width / 2 - 2, 235))
    drawing.line([(left, 324), (left + 36, 324)], color="C")
    drawing.text(
        left + 44, 329, "keys and values of all earlier tokens, from the KV cache", size=14
    )
    drawing.box(left + 450, 314, 20, 20, "A")
    drawing.text(left + 478, 329, "generated: out, then in once", size=14)
    return str(drawing)


def draw_serving() -> str:
    """Draw Figure 2 and what replaces it: who decides about a batch, and when."""
    drawing = _drawing(
        330,
        "A serving system over an execution engine, and the scheduler inside of the loop",
        "serving",
    )
    panels: Mapping[str, tuple[str, str, str]] = {
        "Request by request (Figure 2)": (
            "batch of A and B",
            "all answers, at the end of the longest",
            "all iterations",
        ),
        "Iteration by iteration (Figure 4)": (
            "the next requests",
            "one token of each",
            "one iteration",
        ),
    }
    for index, (title, (down, up, work)) in enumerate(panels.items()):
        y = 34 + 156 * index
        drawing.text(12, y - 8, title, is_bold=True)
        drawing.box(128, y + 4, 286, 104, "page", edge="line", radius=8)
        drawing.text(271, y + 126, "serving system", size=14, color="muted", anchor="middle")
        _labelled(drawing, 12, y + 34, (84, 44), "clients")
        _labelled(drawing, 144, y + 34, (116, 44), "queue, pool")
        _labelled(drawing, 296, y + 34, (104, 44), "scheduler")
        _labelled(drawing, 596, y + 14, (132, 84), work, "A" if index else "B")
        drawing.text(662, y + 126, "execution engine", size=14, color="muted", anchor="middle")
        for start, end in ((96, 144), (260, 296)):
            drawing.arrow((start, y + 48), (end, y + 48))
            drawing.arrow((end, y + 66), (start, y + 66))
        drawing.arrow((400, y + 42), (596, y + 42))
        drawing.arrow((596, y + 74), (400, y + 74))
        drawing.text(505, y + 34, down, size=13, anchor="middle")
        for line, words in enumerate(_two_lines(up)):
            drawing.text(505, y + 92 + 17 * line, words, size=13, anchor="middle")
    return str(drawing)


def _two_lines(text: str) -> list[str]:
    head, comma, tail = text.partition(", ")
    return [head + comma.strip(), tail] if tail else [text]


def draw_partitions() -> str:
    """Draw Figure 6: layers spread over stages, and each layer over the devices of its stage."""
    parts = spans(read_model_config(_MODEL), STAGES)
    drawing = _drawing(
        286, f"{parts[-1].stop} layers in {STAGES} stages of {SHARDS} devices each", "partitions"
    )
    left = 14
    gap = 30
    width = 100
    x = float(left)
    for stage, part in enumerate(parts):
        drawing.box(x, 40, width * part.size + 24, 190, "page", edge="line", radius=8)
        middle = x + width * part.size / 2 + 12
        drawing.text(middle, 28, f"stage {stage + 1}", anchor="middle", is_bold=True)
        for shard in range(SHARDS):
            name = "ABCD"[shard]
            y = 52 + 88 * shard
            for layer in range(part.start, part.stop):
                at = x + 12 + width * (layer - part.start)
                drawing.box(at + 3, y, width - 6, 64, name, radius=6)
                drawing.text(
                    at + width / 2,
                    y + 28,
                    f"layer {layer + 1}",
                    size=14,
                    color="ink",
                    anchor="middle",
                )
                share = "first half" if shard == 0 else "second half"
                drawing.text(at + width / 2, y + 48, share, size=13, color="ink", anchor="middle")
            drawing.text(
                middle,
                y + 79,
                f"device {SHARDS * stage + shard + 1}",
                size=13,
                color="muted",
                anchor="middle",
            )
        x += width * part.size + 24
        if stage < STAGES - 1:
            drawing.arrow((x, 136), (x + gap - 18, 136))
            x += gap - 18
    drawing.text(
        left,
        254,
        "Within a layer (intra-layer, tensor): two sums over the devices of the stage.",
        size=14,
    )
    drawing.text(
        left,
        274,
        "Between stages (inter-layer, pipeline): hidden vectors, one for each token.",
        size=14,
    )
    return str(drawing)


def draw_planes() -> str:
    """Draw Figure 7: plans from the leader to all processes, and hidden vectors from stage to stage."""
    drawing = _drawing(
        338, "Control plane and data plane of three stages, each in a process of its own", "planes"
    )
    xs = (24.0, 278.0, 532.0)
    for stage, x in enumerate(xs):
        is_last = stage == STAGES - 1
        drawing.box(x, 84, 184, 176, "page", edge="line", radius=8)
        drawing.text(
            x + 92,
            284,
            "leader" if is_last else f"worker {stage + 1}",
            anchor="middle",
            is_bold=True,
        )
        _labelled(drawing, x + 16, 98, (152, 40), "pool, scheduler" if is_last else "controller")
        for shard in range(SHARDS):
            name = f"device {SHARDS * stage + shard + 1}"
            _labelled(drawing, x + 16 + 78 * shard, 196, (74, 44), name, "ABCD"[shard])
        drawing.arrow((x + 42, 138), (x + 42, 196))
        drawing.text(x + 50, 162, "launches,", size=13, color="muted")
        drawing.text(x + 50, 179, "no waiting", size=13, color="muted")
        if is_last:
            drawing.arrow((x + 167, 196), (x + 167, 138), color="D")
            drawing.text(x + 164, 170, "tokens", size=13, anchor="end", color="D")
        else:
            drawing.line(
                [(xs[-1] + 92, 98), (xs[-1] + 92, 44), (x + 92, 44), (x + 92, 80)],
                color="A",
                width=3,
            )
            drawing.arrow((x + 92, 70), (x + 92, 98), color="A")
            drawing.line([(x + 184, 218), (xs[stage + 1] - 8, 218)], color="C", width=3)
            drawing.arrow((x + 184, 218), (xs[stage + 1], 218), color="C")
    drawing.text(
        24,
        30,
        "control plane: plans by ZeroMQ, from host to host",
        color="A",
        is_bold=True,
        size=15,
    )
    drawing.text(
        24,
        322,
        "data plane: hidden vectors, from device to device",
        color="C",
        is_bold=True,
        size=15,
    )
    return str(drawing)
