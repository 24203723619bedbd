"""A tokenizer with a hostile regular expression, for tests of every entry point."""

import json
from pathlib import Path

PANICS = "a" * 24
"""A text on which the library panics after 0.2 s: the search exceeds the retries allowed for one match."""
REASON = "Regex search error"
_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "(a|a)*$c|(?:a+)+b"},
    "behavior": "Isolated",
    "invert": False,
}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def write_hostile_tokenizer(directory: Path) -> str:
    """Write a directory with a tokenizer of the letters a (0), b (1) and x (2); return its path."""
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES]},
        "decoder": _BYTES,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "x": 2}, "merges": []},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)
