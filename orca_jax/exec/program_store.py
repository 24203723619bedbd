"""Compiled programs on disk, found without tracing.

JAX's own cache finds a program by its lowered code, so each start traces and lowers all programs before it can load
them. A store finds them by everything that they follow from: the code of this package, the versions of libraries, the
settings of JAX and XLA, the devices, and the shapes. If any of these changes, nothing is found, and the programs are
compiled as before.

A stored program is machine code within a pickle, so its file must be whole and this user's (`helpers/cache_files.py`).
"""

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from orca_jax.helpers.bundled import code_digest
from orca_jax.helpers.cache_files import read_file, write_file
from orca_jax.helpers.processor import all_cpu_flags, cpu_name

logger = logging.getLogger(__name__)

_FOLDER = "executables"  # in the directory of JAX's cache
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_UNRELATED = (
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_num_cpu_devices",
    "jax_log",
    "jax_explain",
)


class ProgramStore:
    """The programs of one configuration in a directory. Nothing that fails here is an error: it returns None.

    Args:
        directory: the directory of the compile cache; None: nothing is stored.
        mesh: the devices of the programs.
        facts: everything else that the programs follow from, apart from their names. Its `repr` is hashed.
    """

    def __init__(self, directory: str | None, mesh: Mesh, facts: object) -> None:
        code = code_digest()
        self._folder = None if directory is None or code is None else Path(directory) / _FOLDER
        self._devices = mesh.devices.flatten().tolist()
        text = repr((code, *_surroundings(mesh), facts))
        self._key = hashlib.sha256(text.encode()).hexdigest()[:32]

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program, ready to be called, or None if it is absent or cannot be loaded."""
        if self._folder is None:
            return None
        path = self._path(self._folder, name)
        try:
            payload, in_tree, out_tree = pickle.loads(zlib.decompress(read_file(path)))
            return serialize_executable.deserialize_and_load(
                payload,
                in_tree,
                out_tree,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        # a damaged file, one of others, or one that this version of XLA cannot read
        except Exception as error:
            logger.warning(
                "the program %s cannot be loaded (%s); it is compiled again",
                path,
                _first_line(error),
            )
            return None

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keep a program. Without effect if the directory cannot be written or XLA cannot serialise the program."""
        if self._folder is None:
            return
        try:
            data = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_file(self._path(self._folder, name), data)
        except Exception as error:
            logger.debug("the program %s is not stored: %s", name, _first_line(error))

    def read(self, name: str) -> bytes | None:
        """What `write` kept beside the programs, or None."""
        try:
            if self._folder is None:
                return None
            return read_file(self._path(self._folder, name))
        except (OSError, ValueError):  # absent or damaged
            return None

    def write(self, name: str, content: bytes) -> None:
        """Keep a measurement of the programs. Without effect if the directory cannot be written."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_file(self._path(self._folder, name), content)

    def _path(self, folder: Path, name: str) -> Path:
        return folder / f"{name}-{self._key}"


def _surroundings(mesh: Mesh) -> tuple[Any, ...]:
    """Everything outside this package that a program depends on."""
    settings = {
        name: value for name, value in jax.config.values.items() if not name.startswith(_UNRELATED)
    }
    device = mesh.devices.flat[0]
    return (
        [version(library) for library in ("jax", "jaxlib", "flax")] + [platform.python_version()],
        (device.platform, device.device_kind, device.client.platform_version),
        # XLA:CPU compiles for the instructions of this processor.
        (platform.machine(), cpu_name(), all_cpu_flags()),
        (mesh.axis_names, mesh.devices.shape, [each.id for each in mesh.devices.flat]),
        (device.client.process_index(), [each.process_index for each in mesh.devices.flat]),
        [os.environ.get(name) for name in _VARIABLES],
        sorted((name, repr(value)) for name, value in settings.items()),
    )


def name_suffix() -> str:
    """The end of the names of programs of this code. JAX's cache, which goes by names too, then has none of other code.

    A program from JAX's cache cannot be stored, so with those of earlier versions no later start would be quicker.
    """
    code = code_digest()
    if code is None:
        return ""
    return f"_{code[:16]}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
