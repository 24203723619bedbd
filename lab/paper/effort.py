"""The size of the runs, and maps over processes."""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from lab.policies import POLICIES
from orca_jax.bench.paper.systems import System


@dataclass(frozen=True)
class Effort:
    """The size of the runs."""

    requests: int = 2000  # at each rate under ORCA; a batch of FasterTransformer serves a fourth of them
    seed: int = 0
    processes: int = 1

    def of(self, system: System) -> int:
        """Requests at each rate. A batch that waits for its longest member takes many iterations for each of them."""
        return self.requests if not POLICIES[system.kind].waits or system.max_bs == 1 else max(20, self.requests // 4)

    def map(self, function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
        """Map over processes."""
        if self.processes == 1:
            return list(map(function, *columns))
        with ProcessPoolExecutor(self.processes, get_context("spawn")) as pool:  # a fork copies locks of threads
            return list(pool.map(function, *columns))
