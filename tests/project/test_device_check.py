"""`scripts/gpu_check` and `scripts/tpu_check` as dry runs: they must work before the first run on a rented chip."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, make_arrays
from tests.covering import slow
from tests.project.source import ROOT

KINDS = ["gpu", "tpu"]


def run(kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / f"{kind}_check"), *flags]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def dry_run(kind: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the result of each part."""
    done = run(kind, *flags, "--dry-run", "--json", "--out", str(folder))
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((folder / "result.json").read_text())
    assert {file.name for file in folder.iterdir()} - {"gpu_blocks.json"} == {
        "result.json",
        "tables.txt",
        "logs.tgz",
    }
    with tarfile.open(folder / "logs.tgz") as archive:
        for name, part in report["parts"].items():
            if part["seconds"]:  # the others had no process
                file = archive.extractfile(f"{name.replace(':', '-')}.jsonl")
                assert file is not None
                assert len(file.read().splitlines()) == len(part["rows"])
    return done.returncode, report["parts"]


@pytest.mark.slow
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
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ["kernels", "steps", "curves"])
def test_every_part(group: str, kind: str, tmp_path: Path) -> None:
    """Limits are ten times those on a device: other programs may use the processors."""
    status, parts = dry_run(kind, tmp_path, group, "--seconds", "16200")
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert status == 0
    assert all(part["rows"] for part in parts.values())
    assert parts["machine"]["rows"][0]["devices"] == {"gpu": 1, "tpu": 2}[kind]
    if group == "kernels":
        assert (
            parts[{"gpu": "speed:others", "tpu": "speed:dense"}[kind]]["rows"][0]["share_of_copy"]
            > 0
        )
        assert kind == "tpu" or json.loads((tmp_path / "gpu_blocks.json").read_text())
        return
    if group == "steps":
        assert parts["serve:orca"]["rows"][-1]["output_tokens_per_s"] > 0
        return
    server, llm = parts["engine:llama-3-8b"]["rows"]
    assert server["text"].strip() == llm["text"].strip() != "" and server["output_tokens"] == 16
    assert "attention by" in llm["line"] and llm["output_tokens_per_s"] > 0
    rows = parts["step:gpt2-xl"]["rows"]
    phases = ["compiled", "warmed", "profiled"]
    assert [row["phase"] for row in rows if "phase" in row] == phases * 2
    assert [row["rows"] for row in rows if row.get("mbu", 0) > 0] == [4, 1]
    assert {"sums", "kernel"} == {row["profile"] for row in rows if "profile" in row}


@pytest.mark.slow
def test_other_models_and_attentions(tmp_path: Path) -> None:
    flags = "--parts", "serve:orca", "--model", "demo", "--attention"
    status, parts = dry_run("tpu", tmp_path, *flags, "xla")
    assert (status, parts["serve:orca"]["rows"][-1]["model"]) == (0, "demo")
    status, parts = dry_run("tpu", tmp_path, *flags, "nonsense")
    assert status == 1
    assert "attention has no implementation 'nonsense'" in parts["serve:orca"]["error"]


ROW = 'print("running case 7", flush=True); open(sys.argv[1], "a").write(json.dumps({"case": 6}) + chr(10));'
FAKES = {
    "fine": ROW,
    "killed": ROW + "os.kill(os.getpid(), 9)",
    "hanging": ROW + "time.sleep(1000)",
    "cut": ROW + """open(sys.argv[1], "a").write('{"case": '); os.kill(os.getpid(), 9)""",
    "lost": "print('JAX finds no GPU'); sys.exit(3)",
    "named": ROW.replace('{"case": 6}', '{"device": "card"}'),
    "parent": "import subprocess; "
    + ROW.replace('{"case": 6}', '{"child": subprocess.Popen(["sleep", "1000"]).pid}')
    + "time.sleep(1000)",
}


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the parts of a group with fakes as processes, by name. Returns the exit status and the saved parts."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check import runner

    def command(args: argparse.Namespace, part: Any, results: object) -> list[str]:
        program = "import json, os, sys, time\n" + FAKES[fakes.get(part.name, "fine")]
        return [sys.executable, "-c", program, str(runner.files_of(args.work, part.name)[0])]

    fakes: dict[str, str] = {}
    monkeypatch.setattr(runner, "command", command)
    monkeypatch.setattr(runner, "RECOVERY", 0.1)
    monkeypatch.setattr(runner, "LEAST", 1.0)
    parts = tuple(replace(part, seconds=min(part.seconds, 3)) for part in runner.PARTS["gpu"])
    monkeypatch.setitem(runner.PARTS, "gpu", parts)

    def run(
        changed: dict[str, str], *names: str, seconds: float = 60.0
    ) -> tuple[int, dict[str, Any]]:
        fakes.update(changed)
        settings = {
            "kind": "gpu",
            "parts": list(names),
            "seconds": seconds,
            "json": False,
            "dry_run": True,
            "limits": {},
        }
        args = argparse.Namespace(
            out=tmp_path / "out", work=tmp_path / "work", attention=None, model=None, **settings
        )
        for folder in (args.out, args.work):
            folder.mkdir(exist_ok=True)
        status = runner.run_parts(args)
        saved = args.out / "result.json"
        return status, json.loads(saved.read_text())["parts"] if saved.exists() else {}

    return run


@pytest.mark.parametrize(
    ("fate", "error"),
    [
        ("killed", "exit -9: running case 7"),
        ("cut", "exit -9: running case 7"),
        slow("hanging", "stopped after 3 s, during: running case 7"),
    ],
)
def test_a_part_that_is_stopped_keeps_its_rows(
    fate: str, error: str, check: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    status, parts = check({"correct:gpu": fate}, "machine", "correct:gpu", "speed:gpu")
    assert status == 1
    assert parts["correct:gpu"]["rows"] == [{"case": 6}]
    assert parts["correct:gpu"]["error"].startswith(error)
    assert parts["speed:gpu"]["ok"], "the others still run"


def test_only_the_first_part_ends_the_run_without_a_device(
    check: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    assert check({"machine": "lost"}, "machine", "speed:gpu") == (2, {})
    status, parts = check(
        {"machine": "fine", "correct:gpu": "lost"}, "machine", "correct:gpu", "speed:gpu"
    )
    assert status == 1
    assert parts["correct:gpu"]["error"] == "JAX finds no GPU"
    assert parts["speed:gpu"]["ok"]


def test_a_failed_case_runs_again_under_a_memory_checker(
    check: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    from lab.device_check import runner

    assert check({}, "correct:gpu", "memcheck:gpu")[1]["memcheck:gpu"]["rows"] == [
        {"skipped": "correct:gpu has no failed case"}
    ]
    _, parts = check({"correct:gpu": "killed"}, "correct:gpu", "memcheck:gpu")
    assert parts["memcheck:gpu"]["rows"] == [{"case": 6}]
    args = argparse.Namespace(work=tmp_path / "work")
    assert runner.failed_case(args, "correct:gpu", parts) == "case 7", "the one that was running"
    parts["correct:gpu"]["rows"].append({"case": "case 3", "error": "differs"})
    assert runner.failed_case(args, "correct:gpu", parts) == "case 3"


def test_results_of_earlier_commands_stay(
    check: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    check({"correct:gpu": "killed"}, "correct:gpu")
    status, parts = check({}, "machine", "speed:gpu")
    assert (status, [*parts]) == (0, ["correct:gpu", "machine", "speed:gpu"])
    saved = tmp_path / "out" / "result.json"
    report = json.loads(saved.read_text())
    report["parts"]["machine"]["rows"] = [{"device": "another"}]
    saved.write_text(json.dumps(report))
    assert [*check({"machine": "named"}, "machine")[1]] == ["machine"], (
        "the others are of another device"
    )


@pytest.mark.slow
def test_the_children_of_a_stopped_part_end_with_it(
    check: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    _, parts = check({"correct:gpu": "parent"}, "correct:gpu")
    (row,) = parts["correct:gpu"]["rows"]
    for _ in range(100):
        if (
            not Path(f"/proc/{row['child']}/cmdline").exists()
            or not Path(f"/proc/{row['child']}/cmdline").read_bytes()
        ):
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_after_an_error_of_the_card_no_other_case_runs(tmp_path: Path) -> None:
    """Each later call of that process would fail as well, and its error would accuse a right kernel."""
    code = """
import sys
from pathlib import Path
from lab.device_check.part import attempt_all, open_rows

def fail():
    raise RuntimeError("CUDA_ERROR_MISALIGNED_ADDRESS")

attempt_all(open_rows(Path(sys.argv[1])), [({"case": 1}, lambda: fail), ({"case": 2}, lambda: fail)])
"""
    path = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", code, str(tmp_path / "rows")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=path)
    assert done.stdout == "running 1\n"
    first, *others = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert first == {"case": 1, "error": "RuntimeError: CUDA_ERROR_MISALIGNED_ADDRESS"}
    assert [set(row) for row in others] == [{"skipped"}]


def test_no_time_is_left(check: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    _, parts = check({}, "machine", seconds=1)
    assert parts["machine"]["error"] == "no time was left"


def test_gaps_and_kinds_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check.profile import gaps, kind_of

    assert gaps([(0, 5), (3, 4), (7, 9), (8, 12)]) == 2
    names = "increments_mosaic_gpu_kernel", "nvjet_tst_64x8", "MemcpyD2D", "loop_add_fusion"
    assert [kind_of(name) for name in names] == ["attention", "products", "copies", "other"]


def test_a_wrong_kernel_is_found_and_a_refusal_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check.correct import compare
    from lab.device_check.part import Skip

    given: Any = jax.tree.map(jnp.asarray, tuple(make_arrays(CASES[0], layout="token_major")))

    def found(change: Callable[[jax.Array], jax.Array]) -> dict[str, Any]:
        """The result for an attention with changed outputs."""
        right = partial(ragged_attention, scores=CASES[0].scores, implementation="reference")
        return compare(lambda *args: change(right(*args)), CASES[0].scores, [given], 1e-4)()

    def refuse(out: jax.Array) -> jax.Array:
        raise NotImplementedError("heads of 7")

    assert found(lambda out: out) == {"difference": 0.0, "allowed": 1e-4}
    assert "differs from the oracle" in found(lambda out: 1.01 * out)["error"]
    assert (
        "differs from the oracle by nan" in found(lambda out: out.at[0, 0, 0].set(jnp.nan))["error"]
    )
    with pytest.raises(Skip, match="heads of 7"):
        found(refuse)
