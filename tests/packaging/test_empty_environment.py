"""The wheel in an environment of its own: the command, the demo, the server with its page, and the notebook."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from orca_jax.cli.main import SUBCOMMANDS
from tests.kernels.native.machine import needs_library
from tests.project.notebook import run_notebook
from tests.project.source import ROOT
from tests.project.test_notebook import pictures, texts
from tests.project.test_wheel import built_wheel, needs_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Environment:
    """A virtual environment with the wheel, and an empty home for each of its programs."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--no-input"]
        needed = [f"{wheel}[plot]", "ipykernel"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *needed], check=True)

    def variables(self, home: Path) -> dict[str, str]:
        """The variables of a program: nothing of this process but the way to the system's programs."""
        return {"PATH": f"{self.bin}:{os.defpath}", "HOME": str(home), "JAX_PLATFORMS": "cpu"}

    def run(self, home: Path, *command: str | Path) -> str:
        """Standard output of a command, in its home."""
        done = subprocess.run(
            command,
            cwd=home,
            env=self.variables(home),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("environment")
    return Environment(folder, built_wheel(folder, {}))


def test_the_command_and_its_subcommands(environment: Environment, tmp_path: Path) -> None:
    shown = environment.run(tmp_path, "orca-jax", "--help")
    assert all(name in shown for name in SUBCOMMANDS)
    assert environment.run(tmp_path, "orca-jax", "--version") == "orca-jax 0.1.0\n"
    for name in SUBCOMMANDS:
        assert environment.run(tmp_path, "orca-jax", name, "--help").startswith(
            f"usage: orca-jax {name}"
        )
    assert "max-num-seqs" in environment.run(tmp_path, "orca-jax", "completion", "bash")


def test_what_is_installed(environment: Environment, tmp_path: Path) -> None:
    """The package alone, typed, and nothing of the tests, the scripts or the pages."""
    program = "import orca_jax, os; folder = os.path.dirname(orca_jax.__file__); print(*os.listdir(folder)"
    program = f"{program}, *os.listdir(os.path.join(folder, 'serve')))"
    names = environment.run(tmp_path, "python", "-c", program).split()
    assert {"py.typed", "_demo", "_demo_length_ranker", "playground"} <= set(names)
    assert not {"tests", "docs", "scripts"} & set(names)
    missing = "import importlib.util as u; print([n for n in ('tests', 'scripts', 'docs', 'pytest') if u.find_spec(n)])"
    assert environment.run(tmp_path, "python", "-c", missing) == "[]\n"
    environment.run(tmp_path, "python", "-m", "pip", "check")


@needs_library
def test_it_has_the_library_in_c(environment: Environment, tmp_path: Path) -> None:
    """Without a compiler on the path, for the platform that the name of the wheel has."""
    (wheel,) = environment.folder.glob("*-manylinux_2_*_x86_64.whl")
    with ZipFile(wheel) as packed:
        sizes = {each.filename: each.compress_size for each in packed.infolist()}
    models = sum(size for name, size in sizes.items() if name.startswith("orca_jax/_demo"))
    assert sum(sizes.values()) - models < 2_000_000
    assert models < 6_500_000
    program = "from orca_jax.kernels.native import load_library; print(load_library(None).name)"
    done = environment.run(
        tmp_path, "env", f"PATH={environment.bin}", environment.bin / "python", "-c", program
    )
    assert done.endswith("-built\n")


@needs_demo
def test_it_generates_with_the_demo(environment: Environment, tmp_path: Path) -> None:
    flags = ["--max-tokens", "8", "--temperature", "0", "--json"]
    answer = environment.run(tmp_path, "orca-jax", "generate", "The sea was", *flags)
    assert '"model": "demo"' in answer and '"prompt": "The sea was"' in answer


@needs_demo
def test_it_converts_and_generates_the_same(environment: Environment, tmp_path: Path) -> None:
    convert = [
        "orca-jax",
        "convert",
        "--model",
        "demo",
        "--output",
        "mine",
        "--quantization",
        "int8",
    ]
    assert "try: orca-jax serve --model mine" in environment.run(tmp_path, *convert)
    generate = ["orca-jax", "generate", "The sea was", "--max-tokens", "12", "--temperature", "0"]
    converted = environment.run(tmp_path, *generate, "--model", "mine")
    assert converted == environment.run(
        tmp_path, *generate, "--model", "demo", "--quantization", "int8"
    )


def test_it_serves_the_page_and_completions(
    environment: Environment, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    command = ["orca-jax", "serve", "--model", "preset:toy", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment.variables(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        stop: Callable[[], None] = server.terminate
        request.addfinalizer(stop)
        assert server.stdout is not None
        url = next(
            word for line in server.stdout for word in line.split() if word.startswith("http://")
        )
        page = httpx.get(url)
        assert page.status_code == 200 and "<html" in page.text
        body = {"model": "preset:toy", "prompt": "hi", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        server.terminate()
        assert server.wait(60) == 0


@needs_demo
def test_the_notebook_runs(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = run_notebook(tmp_path, timeout=900, python=environment.bin / "python")
    assert len(pictures(notebook)) == 2 and "The sea was" in texts(notebook)
