"""Which lines are done, and which ids were seen: on disk, so that a million rows take no memory."""

import hashlib
import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from orca_jax.batch.record import REMEDY
from orca_jax.errors import ConfigError

_CACHE_KIB = 8192


class Ledger:
    """A private database in the system's directory for temporary files, gone with the process however that ends.

    Ids are held as 16 bytes of their hash: among a thousand million of them two collide with probability 1e-21.
    Methods raise OSError where there is no room for it.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID")
        self._db.execute("CREATE TABLE done (line INTEGER PRIMARY KEY, id BLOB NOT NULL)")
        self._db.execute("BEGIN")  # never committed: nobody else reads it
        self.num_done = 0

    def mark_done(self, line: int, custom_id: str | None) -> bool:
        """Note a row of the output; False where its line has one already."""
        found = self._execute("INSERT OR IGNORE INTO done VALUES (?, ?)", (line, _hashed(custom_id)))
        self.num_done += found.rowcount
        return found.rowcount == 1

    def is_done(self, line: int, custom_id: str | None) -> bool:
        """Whether the output has this line's row.

        Raises:
            ConfigError: it has, under another id.
        """
        if not self.num_done:
            return False
        found = self._execute("SELECT id FROM done WHERE line = ?", (line,)).fetchone()
        if found is not None and found[0] != _hashed(custom_id):
            message = f"it answers line {line} under another custom_id; {REMEDY}"
            raise ConfigError(message, param="output")
        return found is not None

    def first_line(self, line: int, custom_id: str) -> int:
        """The line that an id came in first, which is this one where the id is new."""
        key = _hashed(custom_id)
        if self._execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, line)).rowcount:
            return line
        (first,) = self._execute("SELECT line FROM ids WHERE id = ?", (key,)).fetchone()
        return int(first)

    def _execute(self, statement: str, values: Sequence[object]) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise OSError(f"ids cannot be noted in the directory for temporary files ($TMPDIR): {error}") from None

    def close(self) -> None:
        """Let go of the disk."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hashed(custom_id: str | None) -> bytes:
    return hashlib.blake2b((custom_id or "").encode(), digest_size=16).digest()
