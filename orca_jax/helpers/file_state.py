"""The state of a file: what was read of it stays true as long as this does."""

import os
from typing import NamedTuple


class FileState(NamedTuple):
    """The size of an open file and the time of its last change: others are those of a file with other contents."""

    size: int
    changed: int  # in nanoseconds

    @classmethod
    def of(cls, descriptor: int) -> "FileState":
        """The state of an open file. Raises OSError."""
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_mtime_ns)
