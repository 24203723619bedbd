"""The environment of a peer, made if it does not exist."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lab.peers.registry import TORCH, Peer
from orca_jax.values.errors import ConfigError, OrcaError

_INCOMPLETE = ".orca-jax-incomplete"  # a file in an environment until all packages are there
_TREE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """The environment of a peer, with all packages."""

    name: str
    peer: Peer
    folder: Path
    python: Path

    def command(self, program: str, threads: int) -> list[str]:
        """Return the begin of a command. Variables that libraries read before the program runs come from `env`."""
        library = intel_openmp(self.folder) if self.peer.uses_intel_openmp else None
        variables = [f"OMP_NUM_THREADS={threads}", f"PYTHONPATH={_TREE}"]
        if library:
            variables.append(f"LD_PRELOAD={library}")
        return ["env", *variables, str(self.python), str(program_of(program))]


def default_folder(name: str) -> Path:
    """Return the folder of a peer's environment, in the user's cache. Raises ConfigError without a home directory."""
    try:
        return Path.home() / ".cache" / "orca-jax" / "peers" / name
    except RuntimeError:
        message = (
            f"environment is missing, and there is no home directory for a default; give {name}=DIR"
        )
        raise ConfigError(message, param="environment") from None


def program_of(name: str, tree: Path = _TREE) -> Path:
    """Return a program of a peer, by its file name.

    Raises:
        ConfigError: the package does not run from a source tree, or the tree lacks the program.
    """
    path = tree / "lab" / "peers" / "programs" / name
    if not path.is_file():
        message = f"{path} is missing: the programs of peers are in the source tree, not in an installed package"
        raise ConfigError(message, param="peer")
    return path


def prepare_environment(peer: Peer, folder: Path) -> Path:
    """Return the Python of an environment. If the folder does not exist, the environment is made in it.

    An incomplete one is removed again.

    Raises:
        ConfigError: the folder is not an environment, or no suitable Python is installed.
        OrcaError: the packages cannot be installed.
    """
    python = folder / "bin" / "python"
    incomplete = folder / _INCOMPLETE
    if incomplete.exists():  # an earlier run was killed
        shutil.rmtree(folder)
    if python.exists():
        _build(peer, folder, python)
        return python.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = (
            f"{folder} is not an environment of Python: {python} is missing; give another folder"
        )
        raise ConfigError(message, param="environment")
    base = next(
        (found for name in peer.pythons if (found := shutil.which(name)) and _runs(found)), None
    )
    if base is None:
        wanted = " or ".join(peer.pythons)
        message = f"{wanted} is not on the PATH or does not run, and the packages of this peer need it; install it"
        raise ConfigError(message, param="environment")
    packages = [*([TORCH] if peer.needs_torch else []), *peer.packages]
    print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        incomplete.touch()
        _run([base, "-m", "venv", str(folder)])
        _run([*pip, "install", *packages])
        if peer.unwanted:
            _run([*pip, "uninstall", "--yes", *peer.unwanted])
        incomplete.unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _build(peer, folder, python)
    return python.absolute()


def _build(peer: Peer, folder: Path, python: Path) -> None:
    """Compile a peer into its environment, unless that is done. The packages stay if it fails."""
    if peer.build and not (folder / peer.built).exists():
        print(f"compiling {peer.built} into {folder}; this takes minutes", file=sys.stderr)
        _run([str(python.absolute()), str(program_of(peer.build))])


def _runs(python: str) -> bool:
    """True if a command is a Python: a version manager has commands for versions that are not selected."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def intel_openmp(folder: Path) -> Path | None:
    """Return the library of Intel's OpenMP in an environment, if it has one."""
    places = (
        "lib/libiomp5.so",
        "lib/python3*/site-packages/*/libiomp5.so",
        "lib/python3*/site-packages/*/*/libiomp5.so",
    )
    found = chain.from_iterable(sorted(folder.glob(pattern)) for pattern in places)
    return next((path.absolute() for path in found), None)


def _run(command: Sequence[str]) -> None:
    """Run a command.

    Raises:
        OrcaError: it failed; the message has its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OrcaError(
            f"{' '.join(command)} ended with code {done.returncode}: {error_line(done)}; it needs the network. "
            "Or install the packages yourself and give the folder of that environment by --environment"
        )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a program's errors; without errors, that of its output."""
    return ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"])[-1]
