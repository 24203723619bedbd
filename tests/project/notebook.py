"""Runs the example notebook. `python -m tests.project.notebook` saves its outputs, without standard error."""

import asyncio
import json
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.project.source import ROOT

NOTEBOOK = ROOT / "examples" / "orca_jax_colab.ipynb"


def run_notebook(folder: Path, timeout: int = 300, python: Path | None = None) -> Any:
    """Run the notebook from top to bottom in `folder`; returns it with its outputs. Raises if a cell fails.

    Args:
        folder: current directory of the cells.
        timeout: seconds of a cell.
        python: the interpreter of another environment, with ipykernel; None for that of this process.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    options: dict[str, Any] = {
        "resources": {"metadata": {"path": str(folder)}},
        "record_timing": False,
    }
    if python is not None:
        options["km"] = AsyncKernelManager(
            kernel_name=_kernel_of(python, folder), kernel_spec_manager=_specs(folder)
        )
    asyncio.run(NotebookClient(notebook, timeout=timeout, **options).async_execute(cleanup_kc=True))
    return notebook


def _kernel_of(python: Path, folder: Path) -> str:
    """Write the description of a kernel of an interpreter; returns its name."""
    place = folder / "kernels" / "other"
    place.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    described = {"argv": command, "display_name": "other", "language": "python"}
    (place / "kernel.json").write_text(json.dumps(described), encoding="utf-8")
    return "other"


def _specs(folder: Path) -> KernelSpecManager:
    return KernelSpecManager(kernel_dirs=[str(folder / "kernels")])


def tidy(notebook: Any) -> None:
    """Remove contents that differ between machines and do not help readers."""
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = _joined([_bare(output) for output in kept])


def _joined(outputs: list[Any]) -> list[Any]:
    """Make one output of the pieces of a stream."""
    if len(outputs) > 1 and all(output.output_type == "stream" for output in outputs):
        return [
            nbformat.v4.new_output(
                "stream", name="stdout", text="".join(output.text for output in outputs)
            )
        ]
    return outputs


def _bare(output: Any) -> Any:
    if "data" in output and "image/png" in output["data"]:
        output["data"].pop("text/plain", None)
        output["metadata"] = {}
    return output


if __name__ == "__main__":
    done = run_notebook(ROOT)
    tidy(done)
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
