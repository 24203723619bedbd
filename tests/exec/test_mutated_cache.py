"""A thousand damaged files of the compile cache: each is used, replaced, or ignored with a warning. None ends a start.

The library in C, stored programs and the entries of JAX's own cache are loaded and run in a few processes.
"""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from orca_jax.exec import program_store
from orca_jax.exec.compile import compile_cache
from orca_jax.exec.program_store import ProgramStore
from orca_jax.kernels.native import library
from orca_jax.model.load import tensor_mesh
from tests.mutations import mutate_bytes, shrinking

SEED, CASES, PROCESSES = 31, 1000, 10
KINDS = ("library", "program", "cache of JAX")
DAMAGES = (
    "bytes",
    "bytes",
    "bytes",
    "bytes",
    "cut",
    "empty",
    "owner",
    "mode",
    "cut while read",
    "none",
)
DECIDED = ("used", "warned")
OTHER_USER = 20002


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(library.found_compiler() is None, reason="needs a C compiler")
def test_no_file_of_the_cache_ends_a_start(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    found: Counter[str] = Counter()
    for index in range(PROCESSES):
        folder = tmp_path / str(index)
        folder.mkdir()
        command = [
            sys.executable,
            "-m",
            __name__,
            str(folder),
            str(SEED + index),
            str(CASES // PROCESSES),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, (index, run.returncode, run.stdout[-1000:], run.stderr[-3000:])
        found += Counter(json.loads(run.stdout.splitlines()[-1]))
    for name, number in sorted(found.items()):
        print(f"{number:5} {name}")
    assert found.total() == CASES
    for kind in KINDS:
        assert found[f"{kind}, none: used"] > 0 and found[f"{kind}, none: warned"] == 0
        assert found[f"{kind}, bytes: used"] == 0 < found[f"{kind}, bytes: warned"]
    for kind in ("library", "program"):
        assert found[f"{kind}, bytes behind the end: used"] == 0


class Caches:
    """A whole file of each kind, and the means to load it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.x = folder, jnp.arange(3.0)
        self.store = ProgramStore(str(folder), tensor_mesh(jax.devices()[:1]), "facts")
        self.store.save("double-1", self._lowered().compile())
        compiler = library.found_compiler()
        assert compiler is not None
        self.compiler, content = compiler, library._compiled(compiler, None)
        library._compiled = lambda *_: content  # a thousand compilations would take long
        self._library()
        self._of_jax()
        self.files = {
            "library": next(folder.glob("native-*.so")),
            "program": next((folder / "executables").iterdir()),
            "cache of JAX": next((folder / "jax").glob("*-cache")),
        }

    def load(self, kind: str) -> None:
        """Load a file, run what was found, and replace it if it was not used."""
        if kind == "library":
            self._library()
        elif kind == "cache of JAX":
            self._of_jax()
        else:
            program = self.store.load("double-1")
            if program is None:
                self.store.save("double-1", self._lowered().compile())
                program = self.store.load("double-1")
            if program is not None:  # a file that is cut all the time
                assert program(self.x).tolist() == [0, 2, 4]

    def _library(self) -> None:
        functions, _ = library._open(self.compiler, str(self.folder))
        assert functions["orca_jax_width"]() in (16, 32)

    def _of_jax(self) -> None:
        with compile_cache(str(self.folder / "jax")):
            assert self._lowered().compile()(self.x).tolist() == [0, 2, 4]

    def _lowered(self) -> Any:
        return jax.jit(lambda x: x * 2).lower(self.x)


def damage(path: Path, how: str, draw: Random) -> None:
    whole = path.read_bytes()
    if how == "bytes":
        path.write_bytes(mutate_bytes(whole, draw))
    elif how == "cut":
        os.truncate(path, draw.randrange(len(whole)))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "mode":
        path.chmod(0o666)
    elif how == "owner" and os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER)


class Warned(logging.Handler):
    """Counts warnings of the log and of `warnings`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        logging.getLogger().addHandler(self)
        warnings.showwarning = self.take

    def emit(self, record: logging.LogRecord) -> None:
        """A record of the log."""
        self.count += 1

    def take(self, *_: Any, **__: Any) -> None:
        """A warning."""
        self.count += 1


def main(folder: str, seed: str, cases: str) -> None:
    """Load damaged files, and print what became of them."""
    warnings.simplefilter("always")
    program_store.code_digest = lambda: "code"
    draw, caches, warned = Random(int(seed)), Caches(Path(folder)), Warned()
    wholes = {kind: path.read_bytes() for kind, path in caches.files.items()}
    found: Counter[str] = Counter()
    for index in range(int(cases)):
        kind, how = KINDS[index % len(KINDS)], draw.choice(DAMAGES)
        path, before = caches.files[kind], warned.count
        path.unlink(missing_ok=True)  # it may belong to another user
        path.write_bytes(wholes[kind])
        path.chmod(0o600)
        print(index, kind, how, flush=True)
        damage(path, how, draw)
        if how == "bytes" and path.read_bytes() == wholes[kind]:  # cut behind its end, for example
            how = "none"
        if how == "bytes" and path.read_bytes().startswith(wholes[kind]):
            how = "bytes behind the end"  # zlib does not read them
        if how == "cut while read":
            with shrinking(path, draw):
                for _ in range(3):
                    caches.load(kind)
        else:
            caches.load(kind)
        found[f"{kind}, {how}: {DECIDED[warned.count > before]}"] += 1
        if kind != "cache of JAX" and how != "cut while read":
            before = warned.count
            caches.load(kind)
            assert warned.count == before, "a replaced file is whole"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
