"""Compilation in its own thread, while the weights are loaded: programs follow from shapes alone."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from orca_jax.exec.programs import ProgramName, Programs, compile_stages
from orca_jax.helpers.console import Progress
from orca_jax.values.startup import StartTimes


class CompiledAhead:
    """Programs being compiled. A context manager: an error within its block stops the compilation.

    Args:
        stages: shapes of the programs of each stage, made from a decoder without values.
        times: takes the phases of the start and the number of programs.
    """

    def __init__(self, stages: Sequence[Programs], times: StartTimes) -> None:
        self.stages = stages
        self._lock = threading.Lock()
        self._counts = (0, 0)
        self._progress: Progress | None = None
        self._is_stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._programs = self._thread.submit(compile_stages, stages, self._take, times)

    def result(self, progress: Progress) -> list[dict[ProgramName, jax.stages.Compiled]]:
        """Wait for the programs of all stages.

        `progress` is called from here on; two bars at once would disturb each other.
        """
        with self._lock:
            self._progress = progress
            if self._counts[1]:
                progress(*self._counts)
        return self._programs.result()

    def __enter__(self) -> "CompiledAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_stopped = kind is not None
        self._thread.shutdown(wait=kind is None)

    def _take(self, done: int, total: int) -> None:
        if self._is_stopped:
            raise InterruptedError("the programs are not needed any more")
        with self._lock:
            self._counts = done, total
            if self._progress is not None:
                self._progress(done, total)
