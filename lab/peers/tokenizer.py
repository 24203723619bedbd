"""A tokenizer for random weights, for servers and clients that do not run without one.

Its text is arbitrary, but valid: a token is a byte, a character of three bytes in UTF-8, or the first two bytes of one.
So the text of characters is encoded to the same ids again.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LEADS = range(0xE1, 0xED)  # first bytes of U+1000 to U+CFFF; all of these are valid characters
_FOLLOWING = range(0x80, 0xC0)
# bytes that stand for themselves, as in GPT-2
_SHOWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and its configuration in Hugging Face's format, with ids below `vocab_size`."""
    tokens, merges = tokens_and_merges(vocab_size)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    described: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(
        json.dumps(described, ensure_ascii=False), encoding="utf-8"
    )
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def tokens_and_merges(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens in the order of their ids, and the merges."""
    shown = _shown_bytes()
    merges = list(itertools.islice(_merges(shown), max(0, vocab_size - len(shown))))
    tokens = [*shown, *(first + second for first, second in merges)][:vocab_size]
    return tokens + [f"token {number}" for number in range(len(tokens), vocab_size)], merges


def _shown_bytes() -> list[str]:
    """The characters of a byte-level vocabulary for the bytes 0 to 255."""
    others = itertools.count(0x100)
    return [chr(byte) if byte in _SHOWN else chr(next(others)) for byte in range(256)]


def _merges(shown: list[str]) -> Iterator[tuple[str, str]]:
    for lead, second in itertools.product(_LEADS, _FOLLOWING):
        begin = shown[lead], shown[second]
        yield begin
        for third in _FOLLOWING:
            yield "".join(begin), shown[third]
