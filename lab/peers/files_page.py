"""The results of `python -m lab files` as a part of the page on other engines."""

import json
import statistics
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.peers.files import shown_ratio
from lab.peers.page import processor, side_line

MEASURED = sorted(
    (Path(__file__).resolve().parents[2] / "docs" / "measured").glob("peers-files*.json")
)
"""One file for each processor."""
_TEXT = """
## llama.cpp on the same files

Both servers read one GGUF file and answer the same requests, one server at a time, in rounds; each is first
in every other round. A cell has our speed, llama.cpp's, and their ratio, a median with its range. The files of 594
million random parameters are written by the command and quantised by llama.cpp's program; other shapes have random
bits. Flags beside a file are ours.

    python -m lab files --streams 1 8 --prompts 512 --num-output 64 --save docs/measured/peers-files-avx512.json

`--files` names types or other files, and flags of ours follow `--`.

- **streams**: tokens/s of 1, 8 or 32 requests of 16 tokens at once, from each one's first token on.
- **prompt**: tokens/s until the first token.
- **next turn**: milliseconds to the first token of the turns of a chat after the first, about 300 tokens at its begin,
  then 40 generated and 20 new ones each. The ratio is one of speeds here, too.
- **ready**: seconds from the command to the first answer of `/ready`, with our programs in their cache or not.
"""


def block() -> str:
    """Return the text of the results of all processors."""
    return _TEXT + "".join(
        section(json.loads(path.read_text(encoding="utf-8"))) for path in MEASURED
    )


def section(results: Mapping[str, Any]) -> str:
    """Return the table of one processor."""
    ratios = [one["ratios"] for one in results["files"].values()]
    names = list(dict.fromkeys(chain.from_iterable(ratios)))
    head = ["file", *(name.removesuffix("_ms").replace("_", " ") for name in names)]
    head += ["ready, s", "memory read, GB/s", "measured"]
    rows = []
    for file, one in results["files"].items():
        own, peer = one["start_s"]
        end = [
            f"{own:.0f} and {peer:.1f}",
            f"{one['read_gb_per_s']:.0f}",
            f"{one['date']} at {one['commit']}",
        ]
        rows.append([file, *(_cell(one, name) for name in names), *end])
    sides = "".join(side_line(name, side) for name, side in sorted(results["sides"].items()))
    return f"\n{processor(results)}:\n\n{wide_table(head, rows)}\n{sides}"


def _cell(one: Mapping[str, Any], name: str) -> str:
    if name not in one["ratios"]:
        return ""
    own = statistics.median(each[name] for each in one["rounds"]["own"])
    peer = statistics.median(each[name] for each in one["rounds"]["peer"])
    digits = 0 if min(own, peer) >= 100 else 1
    return f"{own:.{digits}f}, {peer:.{digits}f}: **{shown_ratio(one['ratios'][name]).replace(' ', '** ', 1)}"
