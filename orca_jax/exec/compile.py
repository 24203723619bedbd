"""Compilation of all programs at start, kept on disk. Compilations after start are counted."""

import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from orca_jax.exec.host import num_processors
from orca_jax.exec.program_store import ProgramStore
from orca_jax.helpers.cache_files import remove_distrusted
from orca_jax.helpers.console import Progress
from orca_jax.values.platforms import Platform
from orca_jax.values.startup import StartTimes

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_EVENT = "/jax/compilation_cache/cache_hits"
_LEAST_THREADS = 4
_THREAD = "programs"  # the beginning of the names of threads


class CompileCounter:
    """Counts programs compiled by XLA or fetched from its cache, in the whole process, until it is closed.

    Args:
        threads: count in threads whose names begin so; all by default.

    Attributes:
        count: programs of both kinds.
        from_cache: those fetched from the cache.
    """

    def __init__(self, threads: str = "") -> None:
        self.count = 0
        self.from_cache = 0
        self._threads = threads
        self._lock = threading.Lock()
        self._here = threading.local()
        monitoring.register_event_duration_secs_listener(self._on_event)
        monitoring.register_event_listener(self._on_cache_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT and self._counts_here():
            with self._lock:
                self.count += 1
            logger.debug("compiled in %.2f s", duration_secs)

    def _on_cache_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_EVENT and self._counts_here():
            self._here.count = self.from_cache_here + 1
            with self._lock:
                self.from_cache += 1

    @property
    def from_cache_here(self) -> int:
        """Programs fetched from the cache in this thread."""
        return getattr(self._here, "count", 0)

    def _counts_here(self) -> bool:
        """True if the program of this thread, which JAX compiles in it, counts."""
        return threading.current_thread().name.startswith(self._threads)

    def close(self) -> None:
        """Count no more. The listeners may have gone: Tunix clears those of the process."""
        with suppress(AssertionError):
            monitoring.unregister_event_duration_listener(self._on_event)
        with suppress(AssertionError):
            monitoring.unregister_event_listener(self._on_cache_event)


@contextmanager
def compile_cache(directory: str | None) -> Iterator[None]:
    """Keep compiled programs in `directory` within this block, including small and quick ones.

    A directory that cannot be written is never an error: a warning is logged, and programs are compiled without it.
    If it exists, the programs in it are used. JAX runs any file there, so files with other writers are removed first.
    The settings are JAX's own and belong to the process. They are restored at the end for the user's other programs.
    """
    reason = None if directory is None else _unwritable(directory)
    if directory is None or (reason and not os.path.isdir(directory)) or not _is_trusted(directory):
        yield
        return
    wanted: dict[str, Any] = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    _configure(wanted)
    try:
        with warnings.catch_warnings():
            if reason:  # logged once; JAX would warn about every program
                warnings.filterwarnings(
                    "ignore", "Error writing persistent compilation cache entry"
                )
            yield
    finally:
        _configure(before)


def _unwritable(directory: str) -> str | None:
    """Return the reason why the cache cannot be written, and log it, or None. Creates the directory."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        reason = error.strerror or str(error)
    logger.warning(
        "the compile cache %s cannot be written: %s; programs compiled now are compiled again at the next start; give "
        "a writable directory as compile_cache, or none",
        directory,
        reason,
    )
    return reason


def _is_trusted(directory: str) -> bool:
    """True if no other user could have written the files of the directory; those that others could are removed."""
    try:
        remove_distrusted(Path(directory))
    except OSError as error:
        logger.warning(
            "the compile cache %s is not used: a file in it must be removed first: %s",
            directory,
            error,
        )
        return False
    return True


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX reads the directory only once; without this the directory of a second engine would be ignored.
    jax_cache.reset_cache()


Options = Mapping[str, bool | int | str]
"""Options of XLA by name."""


_OF_YNN = "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
"""The operations that XLA for CPUs leaves to the library YNNPACK: products, and no sums."""


def compiler_options(platform: Platform, device_kind: str, *, has_library: bool = False) -> Options:
    """Options of XLA for one kind of device.

    On CPUs YNNPACK adds up arrays of 4,096 numbers or more, in another order than XLA, so the bits of a norm or a
    softmax would depend on the number of tokens beside it. With the library in C, XLA computes all sums.

    By default TPU7x multiplies bfloat16 from tiles of 16 rows, while arrays are stored in tiles of 8: every iteration
    would begin with a copy of all layers' weights, and hold it to the end. With the option off, no copy is made.
    """
    if has_library:
        return {"xla_cpu_experimental_ynn_fusion_type": _OF_YNN}
    if device_kind == "TPU7x":
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
    return platform.options


def compile_one(lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
    """Compile a program. If the compiler no longer supports the options, compile without them and log a warning."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        logger.warning(
            "this version of XLA does not support %s; compiled without it", ", ".join(options)
        )
        return lowered.compile()


def compile_all[K: tuple[str, int]](
    lower: Mapping[K, Callable[[], jax.stages.Lowered]],
    options: Options,
    store: ProgramStore,
    progress: Progress,
    times: StartTimes,
) -> dict[K, jax.stages.Compiled]:
    """Load or compile programs, several at a time: XLA does not hold Python's lock.

    Programs missing in the store are traced in this thread, one after the other, while others are being compiled.
    """
    programs: dict[K, jax.stages.Compiled] = {}
    progress(0, len(lower))

    def done(key: K, program: jax.stages.Compiled) -> None:
        programs[key] = program
        progress(len(programs), len(lower))

    def load(key: K) -> jax.stages.Compiled | None:
        with times.phase("compile"):
            return store.load(_file_name(key))

    def trace(key: K) -> jax.stages.Lowered:
        with times.phase("trace"):
            return lower[key]()

    def compile_and_save(key: K, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        with times.phase("compile"):
            num_before = counter.from_cache_here
            program = compile_one(lowered, options)
            # XLA:CPU serializes a program from a cache without its functions
            if counter.from_cache_here == num_before:
                store.save(_file_name(key), program)
            return program

    counter = CompileCounter(_THREAD)
    threads = ThreadPoolExecutor(max(_LEAST_THREADS, num_processors()), _THREAD)
    try:
        for key, program in zip(lower, threads.map(load, lower), strict=True):
            if program is not None:
                done(key, program)
        num_stored = len(programs)
        compiled = dict[Future[jax.stages.Compiled], K]()
        for key in [key for key in lower if key not in programs]:
            # may raise an error: the programs are not needed any more
            progress(len(programs), len(lower))
            compiled[threads.submit(compile_and_save, key, trace(key))] = key
        for future in as_completed(compiled):
            done(compiled[future], future.result())
        times.count(len(programs), num_stored + counter.from_cache)
    finally:
        counter.close()
        # after an error, the programs not begun are not needed
        threads.shutdown(wait=False, cancel_futures=True)
    return programs


def _file_name(key: tuple[str, int]) -> str:
    return f"{key[0]}-{key[1]}"


def memory_of(program: jax.stages.Compiled) -> tuple[int, int]:
    """Bytes shared by a program's results and arguments, and bytes of temporary memory, on one device."""
    analysis = program.memory_analysis()
    assert analysis is not None, "the backend has no memory analysis"
    return int(analysis.alias_size_in_bytes), int(analysis.temp_size_in_bytes)
