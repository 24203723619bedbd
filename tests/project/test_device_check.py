"""`scripts/gpu_check` and `scripts/tpu_check` as dry runs: they must work before the first run on a rented chip."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, make_arrays
from tests.project.source import ROOT

KINDS = ["gpu", "tpu"]


def run(kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / f"{kind}_check"), *flags]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def dry_run(kind: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the result of each part."""
    done = run(kind, "--dry-run", "--out", str(folder), *flags)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((folder / "result.json").read_text())
    for name, part in report["parts"].items():
        lines = (folder / f"{name.replace(':', '-')}.jsonl").read_text().splitlines()
        assert len(lines) == len(part["rows"])
    return done.returncode, report["parts"]


def test_a_failing_part_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    status, parts = dry_run("gpu", tmp_path, "--parts", "serve:orca,machine", "--model", "nonsense")
    assert status == 1
    assert "nonsense is not a directory" in parts["serve:orca"]["error"]
    assert parts["machine"]["ok"]
    assert parts["machine"]["rows"][-1]["copy_bytes_per_s"] > 0


def test_an_impossible_part_is_skipped_with_a_reason(tmp_path: Path) -> None:
    status, parts = dry_run("tpu", tmp_path, "--parts", "peer:continuous")
    assert status == 0
    assert "no TPU" in parts["peer:continuous"]["rows"][0]["skipped"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_device_it_prints_instructions(kind: str, tmp_path: Path) -> None:
    done = run(kind, "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"JAX finds no {kind.upper()} on this machine" in done.stderr
    assert "try --dry-run on a CPU" in done.stderr


def test_an_unknown_part_is_named() -> None:
    done = run("tpu", "--parts", "machine,correct:gpu")
    assert done.returncode == 2
    assert "--parts: unknown part 'correct:gpu'; the parts are machine, correct:tpu" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", KINDS)
def test_every_part(kind: str, tmp_path: Path) -> None:
    status, parts = dry_run(kind, tmp_path)
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert status == 0
    assert all(part["rows"] for part in parts.values())
    assert parts["machine"]["rows"][0]["devices"] == {"gpu": 1, "tpu": 2}[kind]
    assert parts["speed:gather"]["rows"][0]["share_of_copy"] > 0
    assert all(row["mbu"] > 0 for row in parts["step:gpt2-xl"]["rows"][1:])


@pytest.mark.slow
def test_other_models_and_attentions(tmp_path: Path) -> None:
    flags = "--parts", "serve:orca", "--model", "demo", "--attention"
    status, parts = dry_run("tpu", tmp_path, *flags, "xla")
    assert (status, parts["serve:orca"]["rows"][0]["model"]) == (0, "demo")
    status, parts = dry_run("tpu", tmp_path, *flags, "nonsense")
    assert status == 1
    assert "no attention implementation 'nonsense'" in parts["serve:orca"]["error"]


def test_a_wrong_kernel_is_found_and_a_refusal_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from device_check.correct import compare
    from device_check.part import Skip

    given: Any = jax.tree.map(jnp.asarray, tuple(make_arrays(CASES[0], layout="packed")))

    def found(change: Callable[[jax.Array], jax.Array]) -> dict[str, Any]:
        """The result for an attention with changed outputs."""
        right = partial(ragged_attention, **CASES[0].options, implementation="reference")
        return compare(lambda *args: change(right(*args)), CASES[0].options, given, 1e-4)()

    def refuse(out: jax.Array) -> jax.Array:
        raise NotImplementedError("heads of 7")

    assert found(lambda out: out) == {"difference": 0.0, "allowed": 1e-4}
    assert "differs from the oracle" in found(lambda out: 1.01 * out)["error"]
    assert "differs from the oracle by nan" in found(lambda out: out.at[0, 0, 0].set(jnp.nan))["error"]
    with pytest.raises(Skip, match="heads of 7"):
        found(refuse)
