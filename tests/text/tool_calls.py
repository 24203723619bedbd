"""Tools, calls of them, and the output of a parser for a text in pieces."""

from collections.abc import Sequence
from itertools import pairwise

from orca_jax.text.calls.parts import Reasoning, ToolCall, ToolParser, joined

F, G = "f", "get-weather_2"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in (F, G)
]
A, B = ToolCall(F, '{"x": 1}'), ToolCall(G, "{}")
NAMED = {"type": "function", "function": {"name": F}}


def parse(parser: ToolParser, text: str, cuts: Sequence[int] = ()) -> list[str | ToolCall]:
    """The output for a text in pieces, with adjacent texts and the pieces of a call joined."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    parts = [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]
    return joined([part for part in parts if not isinstance(part, Reasoning)])
