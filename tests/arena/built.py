"""The arena with a stand-in for Pyodide, and with the package itself."""

import io
import shutil
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from scripts.arena import build
from tests.project.source import ROOT


def stand_in(folder: Path, names: tuple[str, ...] = build.PYODIDE) -> str:
    """Write a package with these files; returns its digest."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    folder.mkdir(exist_ok=True)
    (folder / build.PACKAGE).write_bytes(data.getvalue())
    return sha256(data.getvalue()).hexdigest()


def real(out: Path) -> None:
    """Build the arena. Skips the test if the package is not here, and npm is not either."""
    folder = ROOT / "build"
    if not (folder / build.PACKAGE).exists() and shutil.which("npm") is None:
        pytest.skip("needs npm, or the package of Pyodide")
    build.add_arena(out, folder)
