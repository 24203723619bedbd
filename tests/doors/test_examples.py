"""Every example and every block of README.md is run: with the toy or the demo, in this process."""

import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import matplotlib
import nbformat
import pytest
import uvicorn
from IPython.core.inputtransformer2 import TransformerManager
from starlette.testclient import TestClient

import orca_jax
from orca_jax.cli.main import main
from tests.course.solutions import SOLUTIONS
from tests.course.test_course import COURSE, run_lab
from tests.docs.commands import NEWLINE, commands
from tests.docs.pages import Block, blocks
from tests.docs.running import is_program
from tests.docs.test_run import FILES
from tests.doors.served import on_server
from tests.project.source import ROOT

EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")
)
README = [block for block in blocks("README.md") if is_program(block)]
SMALLER = {"preset:gpt2": "preset:gpt2-tiny", "24": "2", "16": "2"}
"""Words of README.md, and those that take less time."""

ARGUMENTS = {"train_and_sample.py": ("--rounds", "3")}
"""Arguments of examples that take less time with them."""

SHOWN = {
    "async_service.py": ".",
    "orca_jax_colab.ipynb": "^The sea was",
    "own_decoder.py": r"\AOne \(",
    "own_retention.py": r"lru: \d+ tokens.*\nGoesOn: \d{4} tokens",
    "train_and_sample.py": "of the sampled characters are right",
}
"""Patterns of the outputs of examples."""

pytestmark = pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
Patch = pytest.MonkeyPatch


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "examples").as_posix()


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_runs(path: Path, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.name, ())])
    monkeypatch.setattr(uvicorn, "run", ask)
    monkeypatch.setattr(orca_jax, "AsyncLLM", partial(toy_service, orca_jax.AsyncLLM))
    if path.parent == COURSE:
        run_lab(path.stem, SOLUTIONS[path.stem], monkeypatch)
    elif path.suffix == ".ipynb":
        run_cells(path)
    else:
        with jax.numpy_dtype_promotion("standard"):  # as users have it
            runpy.run_path(str(path), run_name="__main__")
    shown = capfd.readouterr().out
    assert re.search(SHOWN.get(path.name, ""), shown, re.MULTILINE), shown


def ask(app: Any, port: int) -> None:
    """Call a service as a client would, in place of a server that never ends."""
    with TestClient(app) as client:
        print(client.post("/summary", content="abc").raise_for_status().text or "an empty summary")


def toy_service(kind: Callable[..., Any], model: str) -> Any:
    assert model == "demo"
    return kind("preset:toy", max_model_len=256)


def run_cells(path: Path) -> None:
    """Run the cells of a notebook, without installations and magics."""
    matplotlib.use("agg")
    names: dict[str, Any] = {"get_ipython": Shell}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            text = TransformerManager().transform_cell(cell.source)
            exec(compile(text, f"{path.name}: {cell.id}", "exec"), names)


class Shell:
    """The part of IPython that cells use."""

    def run_line_magic(self, name: str, words: str) -> None:
        assert (name, words) == ("matplotlib", "inline"), f"an installation: {name} {words}"


@pytest.mark.parametrize("block", README, ids=str)
def test_a_block_of_the_readme_runs(block: Block, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    if block.language == "python":
        exec(compile(block.text, str(block), "exec"), {})
        return
    for words in commands(block.text):
        run([SMALLER.get(word, word) for word in words])


def run(words: Sequence[str]) -> None:
    """Run a command of README.md: a server and its client without processes."""
    match words:
        case ["orca-jax", *rest]:
            assert main(rest) == 0
        case ["./scripts/serve"]:
            on_server(["--model", "preset:toy"], partial(post, "/v1/completions", {"prompt": "hi"}))
        case ["curl", "-s", url, *_, "-d", body]:
            fields = json.loads(body.replace(NEWLINE, "\n"))
            names = ["--model", "preset:toy", "--served-model-name", fields["model"]]
            on_server(names, partial(post, url.removeprefix("localhost:8000"), fields))
        case ["./scripts/test"]:
            assert (ROOT / "scripts" / "test").stat().st_mode & 0o100, "it runs this test"
        case _:
            pytest.fail(f"no way to run {words}")


async def post(path: str, fields: dict[str, Any], http: httpx.AsyncClient) -> None:
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    answer = await http.post(path, json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
