"""The groups of `scripts/gpu_check`: each fits its time, and the next one knows what the one before has found."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.project.source import ROOT

KINDS = ["gpu", "tpu"]
LEFT_OUT = {"skipped": "no time was left"}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from lab.device_check import runner

    return runner


@pytest.mark.parametrize("kind", KINDS)
def test_the_limits_of_a_group_fit_its_time(kind: str, runner: ModuleType) -> None:
    """The limits of all parts that are not for spare time, and the time after each part that is killed."""
    assert max(runner.GROUPS.values()) <= 540
    for group, seconds in runner.GROUPS.items():
        parts = [part for part in runner.PARTS[kind] if part.group == group and not part.spare]
        parts += [] if runner.MACHINE in parts else [runner.MACHINE]
        assert len(parts) > 1 and sum(part.seconds + runner.RECOVERY for part in parts) <= seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lease", "lease_engine"])
def test_a_lease_fits_its_time(
    kind: str,
    name: str,
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Both fit into 15 minutes with three and a half for the start and the end of the device."""
    from lab.device_check import __main__ as command_line

    folders = ["--out", str(tmp_path), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["check", kind, name, *folders])
    args = command_line.read_arguments()
    assert args.parts == [*args.limits] and args.parts[0] == "machine"
    assert {*args.parts} <= {part.name for part in runner.PARTS[kind]}
    assert sum(args.limits.values()) + runner.RECOVERY * len(args.parts) <= args.seconds
    assert sum(runner.LEASE_SECONDS.values()) <= 900 - 195


class SlowWorld:
    """Processes that write one row and then work for a while, by a clock that only they move."""

    def __init__(self, runner: ModuleType, monkeypatch: pytest.MonkeyPatch, late: float) -> None:
        self.now, self.limits, self.late = 0.0, dict[str, float](), late
        self.parts = {part.name: part for part in runner.PARTS["gpu"]}
        monkeypatch.setattr(
            runner, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        )
        monkeypatch.setattr(runner.subprocess, "Popen", self.start)
        monkeypatch.setattr(runner, "end", lambda process: self.sleep(runner.RECOVERY))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, command: list[str], **_: object) -> Any:
        name = command[command.index("--child") + 1]
        work = Path(command[command.index("--work") + 1])
        rows = work / f"{name.replace(':', '-')}.jsonl"

        def wait(limit: float) -> int:
            """The part needs its whole limit and `late` seconds more."""
            self.limits[name] = limit
            rows.write_text('{"device": "card", "case": 1}\n')
            taken = self.parts[name].seconds + self.late
            self.sleep(min(taken, limit))
            if taken > limit:
                raise subprocess.TimeoutExpired(name, limit)
            return 0

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("late", [-1.0, 1.0], ids=["at their limits", "beyond their limits"])
@pytest.mark.parametrize(
    ("group", "kept"),
    [
        ("kernels", ["machine", "correct:gpu", "speed:gpu", "tune:gpu"]),
        ("steps", ["machine", "step:llama-3-8b", "serve:orca", "peer:continuous"]),
        ("curves", ["machine", "engine:llama-3-8b", "curves:fig10", "variants:llama-3-8b"]),
    ],
)
def test_slow_parts_leave_the_others_their_time(
    group: str,
    kept: list[str],
    late: float,
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from lab.device_check import __main__ as command_line

    world = SlowWorld(runner, monkeypatch, late)
    monkeypatch.setattr(command_line, "run_parts", runner.run_parts)
    flags = [
        "gpu",
        group,
        "--dry-run",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "new" / "work"),
    ]
    monkeypatch.setattr(sys, "argv", ["check", *flags])
    status = command_line.main()
    parts = json.loads((tmp_path / "out" / "result.json").read_text())["parts"]
    for name in kept:
        assert world.limits[name] == world.parts[name].seconds, "its whole limit is left"
        assert parts[name]["rows"][0]["case"] == 1
        assert parts[name]["ok"] == (late < 0)
    assert world.now <= 540
    wrong = {name for name, part in parts.items() if not part["ok"]}
    assert status == bool(wrong)
    assert late > 0 or all(world.parts[name].spare for name in wrong), (
        "stopped at the end of the group"
    )
    assert [name for name, part in parts.items() if part["error"] == "no time was left"] == []
    assert all(
        world.parts[name].spare for name, part in parts.items() if part["rows"] == [LEFT_OUT]
    )


def test_all_groups_together_run_the_spare_parts_last(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lab.device_check import __main__ as command_line

    monkeypatch.setattr(
        sys, "argv", ["check", "gpu", "--out", str(tmp_path), "--work", str(tmp_path)]
    )
    args = command_line.read_arguments()
    known = {part.name: part for part in runner.PARTS["gpu"]}
    spare = [known[name].spare for name in args.parts]
    assert spare == sorted(spare) and args.parts[0] == "machine" and {*args.parts} == {*known}
    assert args.seconds == 3 * 540


def test_parts_with_a_tool_have_no_pool(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = argparse.Namespace(kind="gpu", work=tmp_path)
    known = {part.name: runner.environment(args, part) for part in runner.PARTS["gpu"]}
    wanted = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name, variables in known.items():
        has_tool = name in ("memcheck:gpu", "counters:gpu")
        assert (wanted.items() <= variables.items()) == has_tool
        assert has_tool or "XLA_PYTHON_CLIENT_ALLOCATOR" not in variables


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({}, "nvcc"),
        ({"cu13": False}, "nvcc"),  # JAX 0.11 then has the text "None"
        ({"cu13": True}, None),
        ({"cuda_nvcc": True}, None),
        ({"cu13": False, "cuda_nvcc": True}, "nvcc"),  # JAX looks at the first alone
    ],
)
def test_cuda_is_found_by_nvcc_where_jax_has_no_path(
    packages: dict[str, bool],
    expected: str | None,
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, has_assembler in packages.items():
        folder = tmp_path / "site" / "nvidia" / name / "bin"
        folder.mkdir(parents=True)
        (folder / ("ptxas" if has_assembler else "other")).touch()
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    nvcc.chmod(0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    assert runner.cuda_root() == (expected and str(tmp_path / "cuda"))
    args = argparse.Namespace(kind="gpu", work=tmp_path)
    assert runner.environment(args, runner.MACHINE).get("CUDA_ROOT") == (
        expected and str(tmp_path / "cuda")
    )
    monkeypatch.setenv("CUDA_ROOT", "mine")
    assert runner.environment(args, runner.MACHINE)["CUDA_ROOT"] == "mine"


def test_steps_read_what_kernels_found(runner: ModuleType, tmp_path: Path) -> None:
    part = {"ok": False, "seconds": 1.0, "error": "differs", "rows": []}
    report = {"check": "gpu", "dry_run": False, "seconds": 1.0, "parts": {"correct:gpu": part}}
    (tmp_path / "result.json").write_text(json.dumps(report))
    args = argparse.Namespace(kind="gpu", dry_run=False, out=tmp_path, attention=None)
    assert runner.attention_for_steps(args, runner.found_before(args)) == "triton"
    args.attention = "gpu"
    assert runner.attention_for_steps(args, runner.found_before(args)) == "gpu"
    args.attention, args.kind = None, "tpu"
    assert runner.found_before(args) == {}, "of another device"
    args.kind = "gpu"
    for text in ("", "[]", '{"check": "gpu"}'):
        (tmp_path / "result.json").write_text(text)
        assert runner.found_before(args) == {}
