"""The final summary of a run: a table for reading, then one line of JSON."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orca_jax.batch.answers import RowSummary


class Summary:
    """Counts of the whole output, and times of this process.

    Attributes:
        figures: times and counts of the engine or server; names of seconds end in `_s`.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._rows = 0
        self._errors: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._rows_before = 0
        self._tokens_before = 0
        self._wall = 0.0
        self._write_seconds = 0.0
        self._around: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part of the run outside the answering. Times of one name are added up."""
        start = time.monotonic()
        yield
        self._around[name] = self._around.get(name, 0.0) + time.monotonic() - start

    def add_row(self, summary: RowSummary) -> None:
        """Count a row."""
        self._rows += 1
        if summary.error is not None:
            self._errors[summary.error] += 1
        self._prompt_tokens += summary.prompt_tokens
        self._completion_tokens += summary.completion_tokens

    def begin(self, rows_before: int) -> None:
        """Set the number of rows written by earlier processes."""
        self._rows_before = rows_before
        self._tokens_before = self._completion_tokens

    def end(self, wall: float, write_seconds: float) -> None:
        """Set the seconds spent answering, and the seconds that the writer's thread spent writing meanwhile."""
        self._wall = wall
        self._write_seconds = write_seconds

    @property
    def result(self) -> dict[str, Any]:
        """All figures of the summary by name."""
        wall = max(self._wall, 1e-9)
        return {
            "rows": self._rows,
            "rows_of_earlier_runs": self._rows_before,
            "errors": dict(self._errors.most_common()),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "rows_per_s": (self._rows - self._rows_before) / wall,
            "output_tokens_per_s": (self._completion_tokens - self._tokens_before) / wall,
            "wall_s": self._wall,
            **self._around,
            **self.figures,
            "write_s": self._write_seconds,
        }

    def print(self) -> None:
        """Print the table and the line of JSON."""
        result = self.result
        errors = result.pop("errors")
        table = {
            name: f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
            for name, value in result.items()
        }
        table |= {f"error: {kind}": f"{count:,}" for kind, count in errors.items()}
        width = max(map(len, table))
        for name, value in table.items():
            print(f"  {name:<{width}}  {value}")
        print(json.dumps({**result, "errors": errors}))
