"""The hook of the build that adds the library in C to a wheel: for Linux on x86-64, on a machine with a C compiler.

The library has each C file for several sets of instructions, and is chosen among them when it is loaded. Other wheels,
and editable installations, have the C files alone, which are compiled at the first start.
"""

import importlib.util
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILER = Path("orca_jax", "kernels", "native", "compiler.py")
_OLDEST_GLIBC = 17  # of the tags that tools know; XLA needs a newer one


class LibraryHook(BuildHookInterface[Any]):
    """The hook of `pyproject.toml`."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what the compilation needs: the headers of XLA."""
        return ["jaxlib>=0.11.2"] if self._compiler()["found_compiler"]() and _is_platform() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to a wheel, and name its platform. Without one, a warning says why.

        Args:
            version: "editable" for an installation that stays in the tree.
            build_data: of hatchling; `force_include`, `pure_python` and `tag` are set.
        """
        functions = self._compiler()
        compiler = functions["found_compiler"]()
        if version == "editable" or not _is_platform():
            return
        headers = importlib.util.find_spec("jaxlib")
        if compiler is None or headers is None or headers.origin is None:
            lacking = "C compiler" if compiler is None else "jaxlib, whose headers it needs"
            self.app.display_warning(
                f"the wheel has no library in C: this machine has no {lacking}"
            )
            return
        include = str(Path(headers.origin).parent / "include")
        try:
            content = functions["compiled"](compiler, functions["wheel_parts"](), include, None)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(
                f"the wheel has no library in C: {getattr(error, 'stderr', None) or error}"
            )
            return
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name, functions["wheel_file"]().name)
        made.write_bytes(functions["sealed"](content))
        build_data["force_include"][str(made)] = (_COMPILER.parent / made.name).as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(content)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder of the library, which the wheel has now."""
        if self._folder is not None:
            self._folder.cleanup()

    def _compiler(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / _COMPILER))


def _is_platform() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _platform_tag(library: bytes) -> str:
    """The oldest systems that have all symbols of a library."""
    symbols = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    return f"manylinux_2_{max(_OLDEST_GLIBC, *symbols)}_x86_64" if symbols else "linux_x86_64"
