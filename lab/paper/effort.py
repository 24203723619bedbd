"""The size of the runs, and maps over processes."""

import argparse
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from lab.baselines import POLICIES
from lab.paper.systems import System


@dataclass(frozen=True)
class Effort:
    """The size of the runs."""

    # at each rate under ORCA; a batch of FasterTransformer serves a fourth of them
    requests: int = 2000
    seed: int = 0
    processes: int = 1
    # requests of a system that runs one at a time; None: as many as the others
    single: int | None = None

    def of(self, system: System) -> int:
        """Requests at each rate: fewer for systems that take many iterations for each of them."""
        if system.max_bs == 1:
            return self.single or self.requests
        return max(20, self.requests // 4) if POLICIES[system.kind].waits else self.requests

    def map(self, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
        """Map over processes."""
        if self.processes == 1:
            return list(map(function, *columns))
        # a fork copies locks of threads
        with ProcessPoolExecutor(self.processes, get_context("spawn")) as pool:
            return list(pool.map(function, *columns))


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the number of processes that a study uses."""
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: all cores)",
    )
