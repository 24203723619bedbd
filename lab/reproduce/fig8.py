"""Figure 8: whole batches of ORCA fill a pipeline, and microbatches of FasterTransformer gain little."""

from typing import Any

from lab.paper.effort import Effort
from lab.paper.pipeline import figure_8
from lab.reproduce.rows import Row

STAGES = 4
LEAST_GAIN = 2.5
"""Of four stages: the gain of ORCA's batches with requests of different lengths."""


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """Return the results and their rows."""
    found = figure_8(effort)
    rows = []
    for workload, gains in found["gain"].items():
        ours = gains["orca"][str(STAGES)]
        theirs = gains["ft"][str(STAGES)]
        text = f"throughput with {STAGES} batches in flight, 1 = one batch: orca(8), {workload} requests"
        rows.append(
            Row(f"fig8.orca.{workload}", text, ours, "no bubbles", holds=ours >= LEAST_GAIN)
        )
        text = (
            f"ft(8,2) cuts its batch into {STAGES} microbatches, 1 = ft(8,8): {workload} requests"
        )
        rows.append(Row(f"fig8.ft.{workload}", text, theirs, "bubbles", holds=theirs < ours))
    return found, rows
