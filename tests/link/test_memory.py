"""The end of an engine process for lack of memory, by the counters of the kernel."""

import os
from pathlib import Path

from orca_jax.link.watch import MemoryWatch

PID = 7
PAGES = 3 * 2**30 // os.sysconf("SC_PAGE_SIZE")


def system(root: Path, kills: int | None) -> Path:
    process = root / f"proc/{PID}"
    process.mkdir(parents=True, exist_ok=True)
    (process / "statm").write_text(f"900000 {PAGES} 5 1 0 4 0\n")
    count = "" if kills is None else f"oom_kill {kills}\n"
    (root / "proc/vmstat").write_text(f"pgfault 12\n{count}oom_killer 5\n")
    return root


def test_a_kill_names_the_memory_and_the_settings(tmp_path: Path) -> None:
    watch = MemoryWatch(PID, system(tmp_path, kills=4))
    watch.look()
    assert watch.reason() is None, "a signal from elsewhere"
    (system(tmp_path, kills=5) / f"proc/{PID}/statm").unlink()
    watch.look()  # the process has gone
    reason = watch.reason()
    assert reason is not None
    assert reason.startswith(
        "was killed by the kernel for lack of memory; it held 3.0 GiB. Lower --num-pages"
    )


def test_a_system_that_does_not_count(tmp_path: Path) -> None:
    assert MemoryWatch(PID, system(tmp_path, kills=None)).reason() is None
    assert MemoryWatch(PID, tmp_path / "empty").reason() is None
