"""Runs the example notebook. `python -m tests.project.notebook` saves its outputs, without standard error."""

import asyncio
import json
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.project.source import ROOT

NOTEBOOK = ROOT / "examples" / "orca_jax_colab.ipynb"


def run_notebook(folder: Path, timeout: int = 300) -> Any:
    """Run the notebook from top to bottom in `folder`; returns it with its outputs. Raises if a cell fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    asyncio.run(client.async_execute())
    return notebook


def tidy(notebook: Any) -> None:
    """Remove contents that differ between machines and do not help readers."""
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [_bare(output) for output in kept]


def _bare(output: Any) -> Any:
    if "data" in output and "image/png" in output["data"]:
        output["data"].pop("text/plain", None)
        output["metadata"] = {}
    return output


if __name__ == "__main__":
    done = run_notebook(ROOT)
    tidy(done)
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
