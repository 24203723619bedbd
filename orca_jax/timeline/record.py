"""Records a timeline of an engine in this process in memory, for notebooks and scripts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from orca_jax.engine import Engine
from orca_jax.timeline.measure import Timeline, timeline_of
from orca_jax.timeline.writer import TimelineHeader, TimelineLine, TimelineWriter
from orca_jax.values.errors import ConfigError


class Recordable(Protocol):
    """An `LLM`, or a `Built` from `build_engine`."""

    @property
    def engine(self) -> Engine:
        """The engine to record."""

    @property
    def timeline_header(self) -> TimelineHeader:
        """The first line of its timeline."""


class Recording:
    """A timeline that grows while the engine runs."""

    def __init__(self, head: TimelineHeader) -> None:
        self._lines: list[TimelineLine] = []
        self.writer = TimelineWriter(head, list, self._lines.extend)

    @property
    def timeline(self) -> Timeline:
        """Arrivals, iterations and ends up to now, without the iterations in flight."""
        self.writer.flush()
        return timeline_of(self._lines)


@contextmanager
def record(source: Recordable) -> Iterator[Recording]:
    """Record the timeline of an engine during the block. The engine must be idle at its begin.

    Example:
        with record(llm) as recording:
            llm.generate(prompts)
        draw_timelines({"my prompts": recording.timeline})

    Raises:
        ConfigError: the engine has a trace file already, or requests are open.
    """
    engine = source.engine
    if source.timeline_header.config.trace_file is not None:
        raise ConfigError(
            "this engine writes its timeline to trace_file; read that with load_timeline instead",
            param="trace_file",
        )
    if engine.has_work:
        message = "requests are open, so the recording would be incomplete; begin it while the engine is idle"
        raise ConfigError(message, param="source")
    recording = Recording(source.timeline_header)
    with engine.observed_by(recording.writer):
        yield recording
