"""Digests of the files of an Orbax checkpoint, in the format of `sha256sum`.

Orbax checks its manifests, but not the values: a bit that a disk or a copy changed would change the texts of the model.
`orca-jax convert` writes the list, and `find params -type f -exec sha256sum {} + > params.sha256` makes one for any
checkpoint.
"""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orca_jax.helpers.buckets.store import Bucket
from orca_jax.helpers.buckets.views import located, shown
from orca_jax.helpers.orbax_names import DIGESTS, PARAMS
from orca_jax.model.files.opened import REQUEST_BYTES
from orca_jax.model.orbax_files import MAX_FILES
from orca_jax.values.checks import open_regular, short
from orca_jax.values.errors import CheckpointError, system_message

REMEDY = f"Copy the checkpoint again; if the change is intended, remove {DIGESTS} or make it again"

_MAX_BYTES = 64 * 2**20  # of the list
_THREADS = 4  # a digest is slower than the page cache
_LINE = re.compile(rf"([0-9a-f]{{64}}) [ *]({PARAMS}/.+)")


def write_digests(directory: Path) -> None:
    """Write the list for the files below `directory`/params. Raises OSError."""
    files = sorted(path for path in (directory / PARAMS).rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = zip(pool.map(_digest, files), files, strict=True)
        lines = [f"{digest}  {file.relative_to(directory)}\n" for digest, file in digests]
    (directory / DIGESTS).write_text("".join(lines), encoding="utf-8")


def check_digests(directory: Path) -> None:
    """Compare the files below `directory`/params with the list, if there is one.

    Raises:
        CheckpointError: lists each file that is missing or has other bytes, or the list is not one.
    """
    path = directory / DIGESTS
    if not path.exists():
        return
    try:
        with open(open_regular(path), "rb") as file:
            lines = file.read(_MAX_BYTES + 1).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(directory, [f"{DIGESTS}: cannot be read: {error}"]) from None
    entries = [_LINE.fullmatch(line) for line in lines]
    for line, entry in zip(lines, entries, strict=True):
        if entry is None or ".." in Path(entry[2]).parts or len(lines) > MAX_FILES:
            raise _refused(
                directory,
                [f"{DIGESTS}: {short(line)} is not a line of `sha256sum` for a file in {PARAMS}/"],
            )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        found = pool.map(
            lambda entry: _problem(directory, entry[1], entry[2]), filter(None, entries)
        )
        if problems := [problem for problem in found if problem is not None]:
            raise _refused(directory, problems)


def _problem(directory: Path, digest: str, name: str) -> str | None:
    try:
        found = _digest(directory / name)
    except OSError as error:
        return f"{name}: cannot be read: {system_message(error)}"
    if found == digest:
        return None
    return f"{name}: has other bytes than those of {DIGESTS}"


def _digest(path: Path) -> str:
    if (place := located(path)) is not None:
        view, key = place
        digest = hashlib.sha256()
        for piece in Bucket(view.name).pieces(key, REQUEST_BYTES):
            digest.update(piece)
        return digest.hexdigest()
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refused(directory: Path, problems: list[str]) -> CheckpointError:
    return CheckpointError(shown(directory), problems, remedy=REMEDY)
