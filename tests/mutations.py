"""Damaged files, for tests that no file can end a program: bytes to other bytes, by a seeded random."""

import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

ODD_NUMBERS = (0, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
ODD_VALUES = (
    *ODD_NUMBERS,
    *(None, True, [], {}, "", "0", [[]] * 3, {"a": {"b": []}}),
    *("\udc00", "\ud800x", "\x00", "é" * 9, "../" * 9, "x" * 5000),
    *(0.5, 1e308, float("nan"), float("inf"), 10**400),
    *(
        {"$ref": "#/anyOf/" + "9" * 5000},
        {"$ref": "#"},
        {"format": {}},
        {"enum": []},
        {"type": []},
        {"required": 5},
    ),
)
"""Values of JSON that a program rarely meets: lengths of 2^31 and 2^63, halves of surrogate pairs, NaN, odd schemas."""

# NaN and infinity, three types
_NOT_FINITE = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xc0\x7f", b"\x00\x7e")
_FIRST_KEY = re.compile(rb'\{\s*("(?:[^"\\]|\\.)*")\s*:')


def mutate_bytes(data: bytes, random: Random, first: int = 0) -> bytes:
    """The data with one to four damages at or behind the byte `first`: bits, cuts, lengths, repetitions, NaN."""
    for _ in range(random.randint(1, 4)):
        at = random.randint(min(first, len(data)), len(data))
        end = min(len(data), at + random.choice((1, 2, 8, 64, 4096)))
        number = random.choice(ODD_NUMBERS) & (2**64 - 1)
        match random.randrange(8):
            case 0 | 1 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + data[end:]
            case 4:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 5:
                odd = struct.pack("<Q", number)[: random.choice((4, 8))]
                data = data[:at] + odd + data[at + len(odd) :]
            case 6:
                data = data[:at] + (odd := random.choice(_NOT_FINITE)) + data[at + len(odd) :]
            case _:
                data = data[:at] + random.randbytes(end - at) + data[end:]
    return data


def mutate_json(text: bytes, random: Random) -> bytes:
    """A JSON text with one to three other values, keys, missing keys or repeated keys. It is valid JSON."""
    value = json.loads(text)
    for _ in range(random.randint(1, 3)):
        value = _mutate_value(value, random)
    text = json.dumps(value).encode()
    if random.random() < 0.3 and (found := list(_FIRST_KEY.finditer(text))):
        at = random.choice(found)
        odd = json.dumps(random.choice(ODD_VALUES)).encode()
        text = text[: at.start() + 1] + at[1] + b": " + odd + b", " + text[at.start() + 1 :]
    return text


def mutate_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with damages anywhere, in the entries of its header, or in its values. Most stay framed."""
    size = int.from_bytes(data[:8], "little")
    match random.randrange(3):
        case 0:
            return mutate_bytes(data, random)
        case 1:
            header = mutate_json(data[8 : 8 + size], random)
            return struct.pack("<Q", len(header)) + header + data[8 + size :]
        case _:
            return mutate_bytes(data, random, first=8 + size)


@contextmanager
def shrinking(path: Path, random: Random) -> Iterator[None]:
    """A time in which the file is cut and made whole again, over and over, by a thread; at its end it is cut."""
    whole, is_over = path.read_bytes(), threading.Event()

    def cut() -> None:
        while not is_over.is_set():
            os.truncate(path, random.randrange(len(whole) or 1))
            path.write_bytes(whole)
        os.truncate(path, len(whole) // 2)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _mutate_value(value: Any, random: Random) -> Any:
    """The value with a change at one place of its tree."""
    if isinstance(value, dict | list) and value and random.random() < 0.9:
        value = value.copy()
        key = (
            random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        )
        match random.randrange(4):
            case 0 if isinstance(value, dict):
                value[key + random.choice(("\udc00", "\x00", "x", " "))] = value.pop(key)
            case 1:
                del value[key]
            case _:
                value[key] = _mutate_value(value[key], random)
        return value
    return random.choice(ODD_VALUES)


def mutate_gguf(data: bytes, random: Random) -> bytes:
    """A GGUF file with damages anywhere, in its header, or in its values. Half of the files have a whole header."""
    names = [match.end() for match in re.finditer(rb"blk\.\d+\.[\w.]+", data)]
    end = max(names) + 64  # the shape, the type and the offset of the last tensor end before
    match random.randrange(4):
        case 0:
            return mutate_bytes(data, random)
        case 1:
            return mutate_bytes(data[:end], random) + data[end:]
        case _:
            return mutate_bytes(data, random, first=end)
