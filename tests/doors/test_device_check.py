"""Each kind of part of `scripts/gpu_check` and `scripts/tpu_check` measures: its shortest one, in this process.

tests/project/test_device_check.py runs all parts as dry runs, slowly.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from lab.device_check import engine, serving, steps, tune, variants
from lab.device_check.__main__ import part_of
from lab.device_check.part import Kind, Setting
from lab.device_check.runner import PARTS
from lab.real import curves, quiet
from orca_jax.exec import programs
from orca_jax.model import load

Rows = list[dict[str, Any]]


def shortest() -> dict[str, tuple[Kind, str]]:
    """The part with the smallest limit of each kind, with its device."""
    found: dict[str, tuple[float, Kind, str]] = {}
    for kind, parts in PARTS.items():
        for part in parts:
            name = part.kind or part.name
            known = found.get(name.partition(":")[0], (part.seconds, kind, name))
            found[name.partition(":")[0]] = min(known, (part.seconds, kind, name))
    return {measure: (kind, name) for measure, (_, kind, name) in found.items()}


@pytest.fixture(autouse=True)
def less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one variant and one size with the toy, once and at once: each takes the same path."""
    monkeypatch.setattr(engine, "MODEL", "preset:toy")
    monkeypatch.setattr(steps, "random_decoder", load.random_decoder)  # which draws once
    monkeypatch.setattr(steps, "DRY_ROWS", steps.DRY_ROWS[:1])
    monkeypatch.setattr(engine, "programs_of", lambda work: "auto")
    monkeypatch.setattr(serving, "figure_10", partial(serving.figure_10, loads=(0.9,)))
    monkeypatch.setattr(variants, "VARIANTS", dict(list(variants.VARIANTS.items())[:1]))
    monkeypatch.setattr(tune, "INCREMENTS", tune.INCREMENTS[:1])
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests have programs
    monkeypatch.setattr(curves, "BATCHES", 1)
    monkeypatch.setattr(curves, "HALVINGS", 1)
    monkeypatch.setattr(quiet, "ATTEMPTS", 1)
    monkeypatch.setattr(quiet.Quiet, "_calm_down", lambda watch: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """What the engine asks of `compiler_options` by way of variants."""
    found: Rows = []
    options = programs.compiler_options

    def recorded(*device: Any, **facts: Any) -> Any:
        found.append(facts)
        return options(*device, **facts)

    monkeypatch.setattr(variants, "compiler_options", recorded)
    monkeypatch.setattr(programs, "compiler_options", options)  # variants leave theirs there
    return found


@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize(("kind", "name"), shortest().values())
def test_a_part_measures(kind: Kind, name: str, asked: Rows, tmp_path: Path) -> None:
    rows: Rows = []
    measure, _, what = name.partition(":")
    setting = Setting(kind, dry_run=True, work=tmp_path, case="mixed, window and soft cap")
    part_of(measure)(what, setting, lambda **row: rows.append(row))
    assert rows and not [row for row in rows if "error" in row]
    assert JUDGED.get(measure, len)(rows)
    assert bool(asked) == (measure == "variants")


def experts_are_right(rows: Rows) -> bool:
    """Both kinds are compared, then measured."""
    assert [row["kind"] for row in rows] == ["bfloat16", "fp4"] * 2
    assert all(row["us"] > 0 for row in rows[2:])
    return all(row["difference"] <= row["allowed"] for row in rows[:2])


def states_are_right(rows: Rows) -> bool:
    """A state is compared, and measured with both loads."""
    compared, *measured = rows
    assert [row["load"] for row in measured] == ["2 single tokens", "a prompt"]
    assert all(row["us"] > 0 for row in measured)
    return 0 < compared["difference"] <= compared["allowed"]


def variants_are_right(rows: Rows) -> bool:
    """The variant is measured, then the other attention."""
    assert [row["variant"] for row in rows] == ["as it is", "attention by reference"]
    return all(row["ms"] > 0 for row in rows)


JUDGED: dict[str, Callable[[Rows], object]] = {
    "experts": experts_are_right,
    "states": states_are_right,
    "variants": variants_are_right,
}
"""What the rows of a measure hold."""
