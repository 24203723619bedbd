"""What a run was begun with, beside its output: only the same run may go on with the file."""

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from orca_jax.batch.input import InputFile
from orca_jax.errors import ConfigError

VERSION = 1
REMEDY = "to begin again pass --overwrite, or name another output"


class RunRecord(msgspec.Struct, frozen=True):
    """The input, and the settings that say what its rows mean."""

    version: int
    sha256: str  # of the input
    size: int  # bytes
    num_lines: int
    settings: dict[str, Any]  # names as flags have them

    def row_id(self, line: int) -> str:
        """The id of a line's row in the output; no other input has it."""
        return f"batch_req_{self.sha256[:12]}_{line}"

    def line_of(self, row_id: str) -> int | None:
        """The line that `row_id` was made for; None if it is of another input."""
        head, _, number = row_id.rpartition("_")
        is_ours = head == self.row_id(0).rpartition("_")[0] and number.isascii() and number.isdecimal()
        return int(number) if is_ours and 1 <= int(number) <= self.num_lines else None


def record_of(file: InputFile, settings: dict[str, Any]) -> RunRecord:
    """What a run with these settings writes down."""
    plain = msgspec.json.decode(msgspec.json.encode(settings))  # as it will be read: lists for tuples
    return RunRecord(VERSION, file.sha256, file.size, file.num_lines, plain)


def record_path(output: Path) -> Path:
    """Where the record of an output lies."""
    return output.with_name(output.name + ".run.json")


def write_record(record: RunRecord, path: Path) -> None:
    """Write it whole or not at all, and onto the disk."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Let new names outlive a loss of power, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_same(record: RunRecord, path: Path) -> None:
    """Compare with the record of the run that began the output.

    Raises:
        ConfigError: there is none, or it differs; the message says in what and how to mend it.
    """
    try:
        begun = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise ConfigError(f"it has rows, and no {path.name} says of what run; {REMEDY}", param="output") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {REMEDY}", param="output") from None
    if begun.version != record.version:
        message = f"it was begun by another version of this program; {REMEDY}"
        raise ConfigError(message, param="output")
    if (begun.sha256, begun.size) != (record.sha256, record.size):
        message = (
            f"the file changed since the output was begun ({begun.num_lines:,} lines then, {record.num_lines:,} now)"
        )
        raise ConfigError(f"{message}; bring the old one back, {REMEDY}", param="input")
    for name in sorted(begun.settings.keys() | record.settings.keys()):
        old, new = begun.settings.get(name), record.settings.get(name)
        if old != new:
            message = f"the output was begun with {_shown(old)} and this is {_shown(new)}; give the old one to go on"
            raise ConfigError(f"{message}; {REMEDY}", param=name)


def _shown(value: object) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
