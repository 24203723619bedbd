"""The record of a run, a file next to its output: only the same run may resume the output."""

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from orca_jax.batch.input import InputFile
from orca_jax.values.checks import open_regular
from orca_jax.values.errors import UNREADABLE, ConfigError

VERSION = 1
MAX_BYTES = 2**20  # of a record; one has some hundreds
REMEDY = "to start again, pass --overwrite or choose another output"


class RunRecord(msgspec.Struct, frozen=True):
    """The fingerprint of the input, and the settings that determine the rows of the output."""

    version: int
    sha256: str  # of the input
    size: int  # bytes
    num_lines: int
    settings: dict[str, Any]  # by flag name, with underscores

    def row_id(self, line: int) -> str:
        """The id of a line's row in the output, unique to this input."""
        return f"batch_req_{self.sha256[:12]}_{line}"

    def line_of(self, row_id: str) -> int | None:
        """The line of a row id; None if the id belongs to another input."""
        head, _, number = row_id.rpartition("_")
        is_ours = (
            head == self.row_id(0).rpartition("_")[0] and number.isascii() and number.isdecimal()
        )
        return int(number) if is_ours and 1 <= int(number) <= self.num_lines else None


def record_of(file: InputFile, settings: dict[str, Any]) -> RunRecord:
    """The record of a run with these settings."""
    # as it will be read back: lists for tuples
    plain = msgspec.json.decode(msgspec.json.encode(settings))
    return RunRecord(VERSION, file.sha256, file.size, file.num_lines, plain)


def record_path(output: Path) -> Path:
    """The path of an output's record."""
    return output.with_name(output.name + ".run.json")


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record to disk, either completely or not at all."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # of a run that was killed; opening a pipe would block
    with beside.open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force new file names in a directory to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_same(record: RunRecord, path: Path) -> None:
    """Compare a record with the one on disk, of the run that started the output.

    Raises:
        ConfigError: there is no such record, or it differs; the message names the difference and a remedy.
    """
    try:
        with open(open_regular(path), "rb") as file:
            begun = msgspec.json.decode(file.read(MAX_BYTES), type=RunRecord)
    except FileNotFoundError:
        raise ConfigError(
            f"the output has rows but no record of its run ({path.name} is missing); {REMEDY}",
            param="output",
        ) from None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {REMEDY}", param="output") from None
    if begun.version != record.version:
        message = f"the output was started by another version of this program; {REMEDY}"
        raise ConfigError(message, param="output")
    if (begun.sha256, begun.size) != (record.sha256, record.size):
        message = (
            f"the file changed since the output was started ({begun.num_lines:,} lines then, "
            f"{record.num_lines:,} now); restore the old file to resume; {REMEDY}"
        )
        raise ConfigError(message, param="input")
    for name in sorted(begun.settings.keys() | record.settings.keys()):
        old = begun.settings.get(name)
        new = record.settings.get(name)
        if old != new:
            message = (
                f"the output was started with {_shown(old)}, but the value is now {_shown(new)}"
            )
            raise ConfigError(f"{message}; use the old value to resume; {REMEDY}", param=name)


def _shown(value: object) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
