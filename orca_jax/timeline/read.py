"""Reads timelines from files, and encodes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.writer import (
    TIMELINE_VERSION,
    Arrival,
    End,
    IterationRecord,
    TimelineHeader,
    TimelineLine,
)
from orca_jax.values.checks import open_regular
from orca_jax.values.errors import UNREADABLE, ConfigError, reason_of


@dataclass(frozen=True)
class _ReadLine:
    """A line of the file; exactly one field is set."""

    head: TimelineHeader | None = None
    arrival: Arrival | None = None
    iteration: IterationRecord | None = None
    end: End | None = None


def encoded(lines: Sequence[TimelineLine]) -> bytes:
    """Return lines as a file has them."""
    return msgspec.json.Encoder().encode_lines(lines)


def load_timeline(path: str) -> Timeline:
    """Read the last timeline in a file.

    Raises:
        ConfigError: the file cannot be read, holds no timeline, or has an invalid line.
    """
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {reason_of(error)}", param="trace") from error
    return parse_timeline(data)


def parse_timeline(data: bytes) -> Timeline:
    """Parse the last timeline in the content of a file; an unfinished last line is left out.

    Raises:
        ConfigError: there is no timeline, or a line is invalid.
    """
    decoder = msgspec.json.Decoder(_ReadLine)
    timeline: Timeline | None = None
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            line = decoder.decode(text)
        except UNREADABLE as error:
            raise ConfigError(
                f"line {number} is not a line of a timeline: {error}", param="trace"
            ) from error
        if line.head is not None:
            if line.head.version != TIMELINE_VERSION:
                message = f"line {number}: the format has version {line.head.version}, and must have {TIMELINE_VERSION}"
                raise ConfigError(message, param="trace")
            timeline = Timeline(line.head)
        elif timeline is None:
            raise ConfigError(
                f"line {number} is not the head of a timeline; record one with --trace-file",
                "trace",
            )
        elif record := line.arrival or line.iteration or line.end:
            timeline.add_record(record)
    if timeline is None:
        raise ConfigError("the file holds no timeline; record one with --trace-file", param="trace")
    return timeline
