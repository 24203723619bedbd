"""A trace in memory, of an engine in this process: for notebooks and scripts, without a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.timeline.read import Run, parse_run
from orca_jax.timeline.writer import Head, TraceWriter


class Recordable(Protocol):
    """An `LLM`, or what `build_engine` returns."""

    @property
    def engine(self) -> Engine:
        """The engine that runs."""

    @property
    def head(self) -> Head:
        """What a trace of it begins with."""


class Recording:
    """What was written down so far."""

    def __init__(self, head: Head) -> None:
        self._parts: list[bytes] = []
        self.writer = TraceWriter(head, msgspec.json.Encoder().encode_lines, self._parts.append)

    @property
    def run(self) -> Run:
        """Arrivals, iterations and ends up to now; an iteration in flight is left out."""
        self.writer.flush()
        return parse_run(b"".join(self._parts))


@contextmanager
def record(source: Recordable) -> Iterator[Recording]:
    """Write down what an engine does in the block. It has to be idle where that begins.

    Example:
        with record(llm) as recording:
            llm.generate(prompts)
        draw_timelines({"my prompts": recording.run})

    Raises:
        ConfigError: it has a trace file already, or requests are open.
    """
    engine = source.engine
    if source.head.config.trace_file is not None:
        raise ConfigError("this engine writes a trace_file; read that with load_run instead", param="trace_file")
    if engine.has_work:
        message = "requests are open, of which a recording would know only half; begin it while the engine is idle"
        raise ConfigError(message, param="source")
    recording, before = Recording(source.head), engine.observer
    engine.observer = recording.writer
    try:
        yield recording
    finally:
        engine.observer = before
