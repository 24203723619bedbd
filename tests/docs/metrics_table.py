"""Writes the rows of metrics in docs/operations.md, from the server's own: `python -m tests.docs.metrics_table`.

The page decides the table and the order of the metrics. A new metric begins as a row with its name.
"""

import re

from lab.pages.markdown import Page, line
from orca_jax.serve.telemetry.metrics import Metrics
from tests.project.source import ROOT


def renewed(text: str) -> str:
    """Return the text of the page with the cells of each metric written again. Raises KeyError for an unknown one."""
    rows = {}
    for family in Metrics("demo").collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family._labelnames)  # type: ignore[attr-defined]
        cells = [f"`{name}`", family.type, labels, family.documentation]
        rows[name] = line(cells).replace("|  |", "| |").rstrip("\n")
    return re.sub(r"(?m)^\| `((?:orca_jax_|vllm:)\w+)`.*$", lambda found: rows[found[1]], text)


PAGE = Page(ROOT / "docs" / "operations.md", renewed, "python -m tests.docs.metrics_table")

if __name__ == "__main__":
    PAGE.write()
