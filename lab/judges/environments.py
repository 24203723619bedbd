"""The clients' environments: one folder each, created once, at exact versions (`requirements/`, `packages/`)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAMP = ".orca-installed"  # a copy of the requirements, so that no hash can collide

__all__ = ["node_modules", "python_environment"]


def python_environment(folder: Path, name: str, version: str, *, is_complete: bool = False) -> Path:
    """The interpreter of an environment. Creates the environment if it is missing or outdated.

    Args:
        folder: folder of all environments.
        name: name of the environment and of its file of requirements.
        version: version of Python, such as "3.12".
        is_complete: the file lists all that is needed, so that requirements of its packages beyond it are left out.

    Raises:
        SystemExit: this version of Python was not found, or pip failed.
    """
    requirements = HERE / "requirements" / f"{name}.txt"
    wanted = f"python {version}\n{requirements.read_text(encoding='utf-8')}"
    target = folder / name
    python = target / "bin" / "python"
    if not is_current(target, wanted):
        print(f"making the environment {name}", file=sys.stderr, flush=True)
        shutil.rmtree(target, ignore_errors=True)
        call([find_python(version), "-m", "venv", str(target)])
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
        ]
        pip += ["--no-deps"] if is_complete else []
        # torch first: it should come from its index of CPU wheels; the other packages then find it installed.
        torch = [
            line
            for line in requirements.read_text(encoding="utf-8").splitlines()
            if line.startswith("torch==")
        ]
        if torch:
            call([*pip, *torch])
        call([*pip, "--requirement", str(requirements)])
        (target / STAMP).write_text(wanted, encoding="utf-8")
    return python


def node_modules(folder: Path, name: str, source: Path) -> Path:
    """A folder with the current `node_modules` of the packages listed in `source`. Raises SystemExit.

    Without a lock there, npm chooses the versions of what the packages need. Install scripts are left out, but for the
    script `setup` of package.json.
    """
    files = [
        file for file in (source / "package.json", source / "package-lock.json") if file.exists()
    ]
    wanted = "".join(file.read_text(encoding="utf-8") for file in files)
    target = folder / name
    if not is_current(target, wanted):
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"error: {name} needs Node.js with npm; install it or put it on PATH")
        print(f"making the environment {name}", file=sys.stderr, flush=True)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in files:
            shutil.copy(file, target)
        install = ["ci"] if len(files) == 2 else ["install", "--no-package-lock"]
        call(
            [npm, "--prefix", str(target), *install, "--no-audit", "--no-fund", "--ignore-scripts"]
        )
        call([npm, "--prefix", str(target), "run", "--if-present", "setup"])
        (target / STAMP).write_text(wanted, encoding="utf-8")
    return target


def is_current(target: Path, wanted: str) -> bool:
    """True if an environment is finished and matches its requirements."""
    stamp = target / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8") == wanted


def call(command: list[str]) -> None:
    """Run a command without output. Raises SystemExit with the end of its output if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise SystemExit(
            f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )


def find_python(version: str) -> str:
    """Find an interpreter of this version with `ensurepip`. Raises SystemExit."""
    for candidate in candidates(version):
        check = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if subprocess.run([candidate, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
            return candidate
    raise SystemExit(
        f"error: this client needs Python {version}; none was found on PATH, under pyenv or under uv"
    )


def candidates(version: str) -> Iterator[str]:
    """Candidate interpreters: PATH, then the folders of pyenv and uv, as in `lib/venv.sh`."""
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions"
    shared = Path(os.environ.get("XDG_DATA_HOME", home / ".local" / "share"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", shared / "uv" / "python"))
    for root, pattern in (
        (pyenv, f"{version}.*/bin/python3"),
        (uv, f"cpython-{version}.*/bin/python3"),
    ):
        yield from (str(path) for path in sorted(root.glob(pattern)))
