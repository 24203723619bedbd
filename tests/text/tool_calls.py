"""Tools, calls of them, and the output of a parser for a text in pieces."""

from collections.abc import Sequence
from itertools import pairwise

from orca_jax.text.tools import ToolCall, ToolParser

F, G = "f", "get-weather_2"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in (F, G)]
A, B = ToolCall(F, '{"x": 1}'), ToolCall(G, "{}")
NAMED = {"type": "function", "function": {"name": F}}


def parse(parser: ToolParser, text: str, cuts: Sequence[int] = (), *, is_cut: bool = False) -> list[str | ToolCall]:
    """The output for a text in pieces, with adjacent texts joined."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    out: list[str | ToolCall] = []
    for item in [*(item for piece in pieces for item in parser.push(piece)), *parser.finish(is_cut)]:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out
