"""The example notebook: its cells are programs, its outputs are small and complete, and it runs from top to bottom."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.project.notebook import NOTEBOOK, run_notebook
from tests.project.source import ROOT
from tests.project.test_hygiene import HOME_OR_SCRATCH

STORED = nbformat.read(NOTEBOOK, as_version=4)
CELLS = [cell for cell in STORED.cells if cell.cell_type == "code"]


def pictures(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]


def texts(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_it_is_a_notebook() -> None:
    nbformat.validate(STORED)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_each_cell_is_a_program_whose_names_exist(cell: Any) -> None:
    tree = ast.parse(TransformerManager().transform_cell(cell.source))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("orca_jax"):
            module = __import__(node.module, fromlist=["*"])
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_stored_outputs_are_small_and_complete() -> None:
    assert NOTEBOOK.stat().st_size < 200_000
    assert len(pictures(STORED)) == 2 and "(orca)\n16 requests, 82 iterations" in texts(STORED)
    assert "the model is smollm2" in texts(STORED) and "The capital of France is Paris." in texts(
        STORED
    )
    kinds = {output.get("name", output.output_type) for cell in CELLS for output in cell.outputs}
    assert kinds == {"stdout", "execute_result"}, "neither errors nor warnings"
    assert not HOME_OR_SCRATCH.search("".join(cell.source for cell in STORED.cells) + texts(STORED))


def test_it_installs_existing_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = re.findall(r'"(\w+),"', CELLS[0].source)
    assert named == ["cuda", "tpu"] and {*named, "plot"} <= set(extras)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without compiled programs, and without a user's settings
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # a closed port: a download would fail
    notebook = run_notebook(tmp_path)
    assert len(pictures(notebook)) == 2
    shown = texts(notebook)
    assert (
        "(request_level)\n16 requests, 149 iterations" in shown
        and "(orca)\n16 requests, 82 iterations" in shown
    )
    assert "the model is " in shown and "The sea was" in shown
