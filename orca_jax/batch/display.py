"""Progress of a run: a bar on a terminal, else a line of text every few seconds."""

import asyncio
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

LINE_SECONDS = 10.0


class Display:
    """Shows the progress of a run. `add_row` is called after every row.

    Args:
        total: number of input rows.
        done: number of rows written by earlier processes.
        out: output stream; a terminal shows the bar.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        total: int,
        done: int,
        out: TextIO,
        *,
        enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = self._first = done
        self._out = out
        self._clock = clock
        self._begun = clock()
        self._tokens = 0
        self._says_lines = enabled and not out.isatty()
        self._bar: tqdm[None] | None = None
        if enabled and out.isatty():
            self._bar = tqdm(
                total=total,
                initial=done,
                desc="Answering",
                unit="row",
                file=out,
                dynamic_ncols=True,
            )

    def add_row(self, tokens: int) -> None:
        """Count an answered row and its generated tokens."""
        self._done += 1
        self._tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate(self._tokens):,.0f} tokens/s", refresh=False)
            self._bar.update()

    async def say_lines(self) -> None:
        """Print a line every `LINE_SECONDS` if there is no bar, until cancelled."""
        while self._says_lines:
            await asyncio.sleep(LINE_SECONDS)
            print(self.line(), file=self._out, flush=True)

    def line(self) -> str:
        """The current state as a line of text."""
        speed = self._rate(self._done - self._first)
        left = time_text((self._total - self._done) / speed) if speed else "unknown time"
        return f"{self._done:,} of {self._total:,} rows, {self._rate(self._tokens):,.0f} tokens/s, {left} left"

    def close(self) -> None:
        """Stop the bar in its current state."""
        if self._bar is not None:
            self._bar.close()

    def _rate(self, count: int) -> float:
        return count / max(self._clock() - self._begun, 1e-9)


def time_text(seconds: float) -> str:
    """A duration in the form `0:09`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
