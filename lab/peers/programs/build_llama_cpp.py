"""Builds llama.cpp into the environment of this Python: `bin/llama-server` and `bin/llama-quantize`.

    python -m lab peers --peer llama.cpp

runs this program once, in an environment that it makes. By hand, in an environment of its own:

    pip install cmake ninja gguf safetensors
    python -m lab.peers.programs.build_llama_cpp

The source is the one that the package llama-cpp-python carries; pip downloads it. They are compiled for the
instructions of this processor, which needs a compiler of C++ and takes minutes (about 200 files).
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-server", "llama-quantize")
_FLAGS = (
    *(
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
    ),
    # nothing is downloaded
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def main() -> None:
    """Download the source, compile the server, and put it beside this Python."""
    place = Path(sys.prefix) / "bin"
    # the environment's own cmake and ninja
    os.environ["PATH"] = f"{place}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
        ]
        _run([*pip, "--dest", name, PACKAGE])
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        (tree,) = folder.glob("*/vendor/llama.cpp")
        build = folder / "build"
        _run(["cmake", "-S", str(tree), "-B", str(build), *_FLAGS])
        _run(["cmake", "--build", str(build), "--target", *PROGRAMS])
        for program in PROGRAMS:
            shutil.copy2(build / "bin" / program, place / program)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"{end}\nerror: {command[0]} ended with code {done.returncode}")


if __name__ == "__main__":
    main()
