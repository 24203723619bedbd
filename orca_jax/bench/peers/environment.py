"""The environment of a peer, made if it does not exist."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orca_jax.bench.peers.registry import TORCH, Peer
from orca_jax.errors import ConfigError, OrcaError

_INCOMPLETE = ".orca-jax-incomplete"  # a file in an environment until all packages are there
_TREE = Path(__file__).parents[3]


def program_of(peer: Peer, tree: Path = _TREE) -> Path:
    """Return the program of a peer.

    Raises:
        ConfigError: the package does not run from a source tree, or the tree lacks the program.
    """
    path = tree / "scripts" / "peers" / peer.program
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
    python, incomplete = folder / "bin" / "python", folder / _INCOMPLETE
    if incomplete.exists():  # an earlier run was killed
        shutil.rmtree(folder)
    if python.exists():
        return python.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is not an environment of Python: {python} is missing; give another folder"
        raise ConfigError(message, param="environment")
    base = next((found for name in peer.pythons if (found := shutil.which(name))), None)
    if base is None:
        wanted = " or ".join(peer.pythons)
        message = f"{wanted} is not on the PATH, and the packages of this peer need it; install it"
        raise ConfigError(message, param="environment")
    print(f"installing {', '.join((TORCH, *peer.packages))} into {folder}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        incomplete.touch()
        _run([base, "-m", "venv", str(folder)])
        _run([*pip, "install", TORCH, *peer.packages])
        if peer.unwanted:
            _run([*pip, "uninstall", "--yes", *peer.unwanted])
        incomplete.unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python.absolute()


def intel_openmp(folder: Path) -> Path | None:
    """Return the library of Intel's OpenMP in an environment, if it has one."""
    places = (
        "lib/libiomp5.so",
        "lib/python3*/site-packages/*/libiomp5.so",
        "lib/python3*/site-packages/*/*/libiomp5.so",
    )
    return next((path.absolute() for pattern in places for path in sorted(folder.glob(pattern))), None)


def _run(command: Sequence[str]) -> None:
    """Run a command.

    Raises:
        OrcaError: it failed; the message has its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise OrcaError(
            f"{' '.join(command)} ended with code {done.returncode}: {lines[-1]}; it needs the network. "
            "Or install the packages yourself and give the folder of that environment"
        )
