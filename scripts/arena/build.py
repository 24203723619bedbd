"""The folder `arena/` of the site: `python -m scripts.arena.build OUT`.

Pyodide is a package of npm at an exact version, whose digest is checked. It stays in `build/` for the next build.
"""

import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from orca_jax.timeline.html import STYLES
from orca_jax.timeline.palette import PAGE_FOLDER, palette_css
from orca_jax.values.config import SCHEDULERS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ICON = ROOT / "orca_jax" / "serve" / "playground" / "page" / "icon.svg"
PACKAGE = "pyodide-314.0.7.tgz"
DIGEST = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
    "package.json",
    "README.md",
)
"""The files of the package that the page loads, and those that name its version and its licence."""
PART = "# Your part"
_CLOSURE = """
import sys
import scripts.arena.browser
for module in list(sys.modules.values()):
    if module.__name__.partition(".")[0] == "orca_jax":
        print(module.__file__)
"""


def add_arena(out: Path, folder: Path) -> None:
    """Make the arena.

    Args:
        out: its folder.
        folder: keeps the package of Pyodide for the next build.

    Raises:
        SystemExit: the package cannot be had, or is another one.
    """
    package = fetched(folder)
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(HERE / "page", out, ignore=shutil.ignore_patterns("*.css"))
    shutil.copy(ICON, out)
    styles = [PAGE_FOLDER / STYLES[0], HERE / "page" / "arena.css"]
    texts = [style.read_text(encoding="utf-8") for style in styles]
    (out / "style.css").write_text(palette_css() + "".join(texts), encoding="utf-8")
    (out / "modules.zip").write_bytes(modules())
    (out / "content.json").write_text(json.dumps(content()), encoding="utf-8")
    unpack(package, out / "pyodide")


def fetched(folder: Path) -> bytes:
    """Return the package of Pyodide, from a folder or through npm. Raises SystemExit."""
    path = folder / PACKAGE
    if not path.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(
                f"error: the arena needs {path}; install Node.js with npm, or give --no-arena"
            )
        folder.mkdir(parents=True, exist_ok=True)
        name = PACKAGE.removesuffix(".tgz").replace("-", "@")
        command = [npm, "pack", name, "--silent", "--pack-destination", str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"error: npm cannot fetch {name}: {done.stdout[-500:]}; put it at {path}, or give --no-arena"
            )
    data = path.read_bytes()
    found = sha256(data).hexdigest()
    if found != DIGEST:
        raise SystemExit(
            f"error: {path} has the SHA-256 {found}, and must have {DIGEST}; delete it"
        )
    return data


def unpack(package: bytes, out: Path) -> None:
    """Write the files of `PYODIDE`."""
    out.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in PYODIDE:
            file = archive.extractfile(f"package/{name}")
            assert file is not None, name
            (out / name).write_bytes(file.read())


def modules() -> bytes:
    """Return an archive of the modules that a simulation imports, with what they read, and of `arena`."""
    command = [sys.executable, "-c", _CLOSURE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    files = [*map(Path, done.stdout.split()), *PAGE_FOLDER.iterdir()]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files):
            archive.write(file, str(file.relative_to(ROOT)))
        archive.write(HERE / "browser.py", "arena.py")
    return data.getvalue()


def content() -> dict[str, Any]:
    """Return the texts of the policies, the schedulers of the engine, and the labs."""
    policies = sorted((ROOT / "lab" / "policies").glob("[a-z]*.py"))
    labs = sorted((ROOT / "examples" / "course").glob("*.ipynb"))
    return {
        "policies": {path.stem: path.read_text(encoding="utf-8") for path in policies},
        "own": list(SCHEDULERS),
        "labs": [{"name": path.stem, "cells": cells_of(path)} for path in labs],
    }


def cells_of(notebook: Path) -> list[dict[str, str]]:
    """Return the cells of a lab, but for the one that installs the project and the words about it."""
    found = list[dict[str, str]]()
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            found.append({"kind": "text", "html": MarkdownIt().render(text)})
        elif "%pip" in text:
            found.pop()
        elif text.startswith(PART):
            found.append({"kind": "part", "text": text})
        else:
            found.append({"kind": "code", "text": text})
    return found


if __name__ == "__main__":
    add_arena(Path(sys.argv[1]), ROOT / "build")
