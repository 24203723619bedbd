"""The lines already answered and the ids already seen, on disk, so that a million rows take no memory."""

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Self

from orca_jax.batch.record import REMEDY
from orca_jax.values.errors import ConfigError

_CACHE_KIB = 8192


class Ledger:
    """A private database in the system's directory for temporary files. It disappears when the process ends.

    Ids are stored as 16-byte hashes: the probability of a collision among a thousand million ids is 1e-21.
    Methods raise OSError if the directory is full.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(
            "CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID"
        )
        self._db.execute("CREATE TABLE done (line INTEGER PRIMARY KEY, id BLOB NOT NULL)")
        self._db.execute("BEGIN")  # never committed: no other connection reads it
        self.num_done = 0

    def mark_done(self, line: int, custom_id: str | None) -> bool:
        """Record a row of the output; return False if its line already has one."""
        found = self._execute(
            "INSERT OR IGNORE INTO done VALUES (?, ?)", (line, _hashed(custom_id))
        )
        self.num_done += found.rowcount
        return found.rowcount == 1

    def is_done(self, line: int, custom_id: str | None) -> bool:
        """True if the output has the row of this line.

        Raises:
            ConfigError: it has the row with another id.
        """
        if not self.num_done:
            return False
        found = self._execute("SELECT id FROM done WHERE line = ?", (line,)).fetchone()
        if found is not None and found[0] != _hashed(custom_id):
            message = f"the output answers line {line} with another custom_id; {REMEDY}"
            raise ConfigError(message, param="output")
        return found is not None

    def first_line(self, line: int, custom_id: str) -> int:
        """The first line with this id. For a new id, record `line` and return it."""
        key = _hashed(custom_id)
        if self._execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, line)).rowcount:
            return line
        (first,) = self._execute("SELECT line FROM ids WHERE id = ?", (key,)).fetchone()
        return int(first)

    def _execute(self, statement: str, values: Sequence[object]) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise OSError(
                f"cannot store ids in the directory for temporary files ($TMPDIR): {error}"
            ) from None

    def close(self) -> None:
        """Free the disk space."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _hashed(custom_id: str | None) -> bytes:
    return hashlib.blake2b((custom_id or "").encode(), digest_size=16).digest()
