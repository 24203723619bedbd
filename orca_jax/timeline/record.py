"""A trace in memory, of an engine in this process: for notebooks and scripts, without a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.timeline.read import Timeline, parse_timeline
from orca_jax.timeline.writer import TimelineHeader, TimelineWriter


class Recordable(Protocol):
    """An `LLM`, or what `build_engine` returns."""

    @property
    def engine(self) -> Engine:
        """The engine that timelines."""

    @property
    def timeline_header(self) -> TimelineHeader:
        """What a trace of it begins with."""


class Recording:
    """What was written down so far."""

    def __init__(self, head: TimelineHeader) -> None:
        self._parts: list[bytes] = []
        self.writer = TimelineWriter(head, msgspec.json.Encoder().encode_lines, self._parts.append)

    @property
    def timeline(self) -> Timeline:
        """Arrivals, iterations and ends up to now; an iteration in flight is left out."""
        self.writer.flush()
        return parse_timeline(b"".join(self._parts))


@contextmanager
def record(source: Recordable) -> Iterator[Recording]:
    """Write down what an engine does in the block. It has to be idle where that begins.

    Example:
        with record(llm) as recording:
            llm.generate(prompts)
        draw_timelines({"my prompts": recording.timeline})

    Raises:
        ConfigError: it has a trace file already, or requests are open.
    """
    engine = source.engine
    if source.timeline_header.config.trace_file is not None:
        raise ConfigError("this engine writes a trace_file; read that with load_timeline instead", param="trace_file")
    if engine.has_work:
        message = "requests are open, of which a recording would know only half; begin it while the engine is idle"
        raise ConfigError(message, param="source")
    recording, before = Recording(source.timeline_header), engine.observer
    engine.observer = recording.writer
    try:
        yield recording
    finally:
        engine.observer = before
