"""Measure the bytes per second of pages in memory and in files, beside plain copies and `dd` on the same machine."""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np

from orca_jax.exec.tiers.base import PageName, StoredPage, Tier
from orca_jax.exec.tiers.files import FileTier
from orca_jax.exec.tiers.memory import MemoryTier
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.values.errors import ConfigError

MIB = 1 << 20


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_number(parser, "--page-kib", 1440, "bytes of a page, in KiB; those of SmolLM2 by default")
    add_number(parser, "--pages", 256, "pages")
    add_number(parser, "--repeat", 3, "rounds; the result is the median")
    parser.add_argument("--folder", help="where files are written (default: a temporary folder)")


def run(args: argparse.Namespace) -> int:
    """Print GB/s of each way, and a line of JSON. Raises ConfigError: a number is too small."""
    if min(args.page_kib, args.pages, args.repeat) < 1:
        raise ConfigError("page_kib, pages and repeat must be at least 1", param="pages")
    pages = _pages(args.page_kib << 10, args.pages)
    rounds = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rounds.append(_round(pages, Path(folder)))
    row = {}
    for name in rounds[0]:
        row[name] = statistics.median([each[name] for each in rounds])
    print_table(f"{args.pages} pages of {args.page_kib} KiB, GB/s", row)
    print(json.dumps({"rounds": rounds, "hardware": hardware(), **row}))
    return 0


def _pages(size: int, number: int) -> list[StoredPage]:
    """Pages with numbers of their own."""
    draw = np.random.default_rng(0)
    return [
        StoredPage(_name(index), index, (draw.integers(0, 256, size, np.uint8).data,))
        for index in range(number)
    ]


def _name(index: int) -> PageName:
    return 0, sha256(b"%d" % index).digest()


def _round(pages: list[StoredPage], folder: Path) -> Mapping[str, float]:
    """GB/s of each way. Files are read from the memory of the system where it still has them."""
    total = sum(page.num_bytes for page in pages)
    room = 2 * total
    memory = MemoryTier(room)
    files = FileTier(str(folder / "pages"), sha256(b"model").digest(), room)
    files.scan()
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: _copy(pages),
        "memory_written": lambda: _write(memory, pages),
        "memory_read": lambda: _read(memory, pages),
        "files_written": lambda: _write(files, pages),
        "files_read": lambda: _read(files, pages),
        "dd_written": lambda: _dd(folder, total, "of", "if=/dev/zero"),
        "dd_read": lambda: _dd(folder, total, "if", "of=/dev/null"),
    }
    found = {}
    for name, run_once in ways.items():
        begin = time.perf_counter()
        run_once()
        found[name] = total / (time.perf_counter() - begin) / 1e9
    return found


def _copy(pages: list[StoredPage]) -> None:
    for page in pages:
        np.frombuffer(page.payload[0], np.uint8).copy()


def _write(tier: Tier, pages: list[StoredPage]) -> None:
    for page in pages:
        tier.write(page)


def _read(tier: Tier, pages: list[StoredPage]) -> None:
    for page in pages:
        tier.read(page.name)


def _dd(folder: Path, total: int, side: str, other: str) -> None:
    """Write or read a file of as many bytes, in blocks of a MiB."""
    count = max(total // MIB, 1)
    words = ["dd", f"{side}={folder / 'plain'}", other, "bs=1M", f"count={count}", "status=none"]
    subprocess.run(words, check=True, env={**os.environ, "LC_ALL": "C"})
