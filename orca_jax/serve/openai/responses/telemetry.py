"""The speed of a streamed response, in the form of llama.cpp."""

import time
from collections.abc import Callable
from typing import Any

from msgspec import UnsetType

from orca_jax.serve.openai.schema.answers import Usage


class Telemetry:
    """Measures one call. Times begin with the object, so that of the prompt contains the wait for the engine.

    Args:
        usage: returns the token counts so far.
        has_timings: `timings` are wanted.
        has_progress: `progress` is wanted.
    """

    def __init__(
        self, usage: Callable[[], Usage], *, has_timings: bool, has_progress: bool
    ) -> None:
        self._usage = usage
        self._has_timings = has_timings
        self._has_progress = has_progress
        self._start = time.monotonic()
        self._first: float | None = None  # time of the first piece

    def progress(self) -> dict[str, Any]:
        """The fields of an event for the first piece, with the processed prompt; empty for later ones."""
        if self._first is not None:
            return {}
        self._first = time.monotonic()
        total, cached, _ = self._counts()
        done = {
            "total": total,
            "cache": cached,
            "processed": total,
            "time_ms": self._ms(self._start, self._first),
        }
        return {"prompt_progress": done} if self._has_progress else {}

    def timings(self) -> dict[str, Any]:
        """The fields of an event with the times up to now; empty if they are not wanted."""
        if not self._has_timings or self._first is None:
            return {}
        total, cached, predicted = self._counts()
        phases = {
            "prompt": (total - cached, self._ms(self._start, self._first)),
            "predicted": (predicted, self._ms(self._first, time.monotonic())),
        }
        found: dict[str, Any] = {"cache_n": cached}
        for name, (count, ms) in phases.items():
            found |= {
                f"{name}_n": count,
                f"{name}_ms": ms,
                f"{name}_per_token_ms": ms / max(1, count),
            }
            found[f"{name}_per_second"] = count / ms * 1e3
        return {"timings": found}

    def _counts(self) -> tuple[int, int, int]:
        """The tokens of the prompt, those of them from the cache, and the generated ones."""
        usage = self._usage()
        details = usage.prompt_tokens_details
        cached = 0 if isinstance(details, UnsetType) else details.cached_tokens
        return usage.prompt_tokens, cached, usage.completion_tokens

    @staticmethod
    def _ms(start: float, end: float) -> float:
        return max(1e-3, (end - start) * 1e3)  # a clock may be coarse
