"""The phases of a start, with a clock moved by the test."""

import ctypes
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.values.config import EngineConfig
from orca_jax.values.startup import (
    START_PHASES,
    EngineSummary,
    StartReport,
    StartTimes,
    StateBlocks,
    WindowBlocks,
)


class MovedClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


def test_phases_are_summed_and_the_total_is_separate(clock: MovedClock) -> None:
    times = StartTimes(90.0, clock)
    times.add_time("import", times.elapsed)
    for seconds in (2, 3):
        with times.phase("load"):
            clock.now += seconds
        clock.now += 10  # in no phase
    with pytest.raises(KeyError), times.phase("trace"):
        clock.now += 1
        raise KeyError
    times.count(16, 12)
    times.count(1, 0)
    report = times.report()
    assert report.seconds == {"import": 10, "load": 5, "trace": 1, "compile": 0, "warm_up": 0}
    assert tuple(report.seconds) == START_PHASES
    assert (report.total, report.programs, report.from_cache) == (36, 17, 12)


def test_phases_overlap(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    with times.phase("compile"), times.phase("load"):
        clock.now += 4
        with times.phase("compile"):  # as in a second thread
            clock.now += 1
    assert times.report().seconds == {
        "import": 0,
        "load": 5,
        "trace": 0,
        "compile": 5,
        "warm_up": 0,
    }


def test_a_running_phase_counts_up_to_now(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    with times.phase("compile"):
        clock.now += 3
        assert times.report().seconds["compile"] == 3
        clock.now += 1
    assert times.report().seconds["compile"] == 4


def test_threads_share_a_phase(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    together = threading.Barrier(9)

    def work() -> None:
        for _ in range(200):
            with times.phase("compile"):
                times.count(1, 1)
        with times.phase("compile"):
            together.wait(60)  # all are in it
            together.wait(60)  # the clock has moved

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    together.wait(60)
    clock.now += 7
    together.wait(60)
    for thread in threads:
        thread.join(60)
    report = times.report()
    assert (report.seconds["compile"], report.programs, report.from_cache) == (7, 1600, 1600)


def test_the_total_begins_in_another_process() -> None:
    built = build_engine(
        EngineConfig(model="preset:toy"), times=StartTimes(StartTimes()._clock() - 50)
    )
    assert 50 <= built.start.total < 80
    assert (built.start.programs, built.start.seconds["compile"]) == (0, 0)


def test_the_line_about_an_engine() -> None:
    start = StartReport(
        {"import": 2.14, "load": 0.5, "trace": 0.01, "compile": 8.0, "warm_up": 0.7}, 12.34, 16, 12
    )
    summary = EngineSummary(
        1024, 73600, 71, 128, "chunked", start, "cpu", 2, "bfloat16", "float32", "xla"
    )
    summary = replace(summary, kv_bytes=3 * 2**29)
    assert summary.line("demo") == (
        "demo on 2 x cpu, bfloat16, attention by xla; context of 1,024 tokens; float32 KV cache of 73,600 tokens "
        "(71 full requests), at most 1.50 GiB; scheduler chunked, at most 128 tokens at once; 16 programs (12 from the "
        "cache); ready after 12.3 s (import 2.1, load 0.5, compile 8.0, warm-up 0.7)"
    )


@pytest.mark.parametrize(
    ("settings", "tokens", "requests"),
    [
        ({"num_pages": 13, "page_size": 16}, 208, 2),  # 5 pages for 70 tokens
        ({"scheduler": "orca", "num_pages": 100, "page_size": 16, "n_slots": 150}, 150, 2),
    ],
)
def test_the_line_of_the_toy_is_logged(
    settings: dict[str, Any], tokens: int, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "orca_jax.assembly.engine"):
        built = build_engine(
            EngineConfig(model="preset:toy", max_model_len=70, max_num_seqs=2, **settings)
        )
    (record,) = caplog.records
    assert record.message.startswith(
        f"preset:toy without a device; context of 70 tokens; KV cache of {tokens} tokens ({requests} full requests); "
        f"scheduler {built.summary.scheduler}, at most {built.summary.token_budget:,} tokens at once; ready after "
    )


def test_the_line_about_windows() -> None:
    groups = (WindowBlocks(10, None, 1, 256), WindowBlocks(52, 1024, 6, 13))
    summary = EngineSummary(
        32768, 40000, 1, 512, "chunked", StartReport({}, 1.0), "cpu", 1, page_size=128
    )
    summary = replace(summary, num_pages=600, kv_groups=groups)
    assert (
        "KV cache of 40,000 tokens (1 full requests) in 600 blocks of 128 tokens, of which one takes 256 for 10 layers "
        "with all tokens, 6 x 13 for 52 layers with a window of 1,024 tokens; scheduler"
        in summary.line("gemma3")
    )
    assert "in 600 and 90 blocks, divided for requests" in replace(
        summary, kv_pools=(600, 90)
    ).line("gemma3")


def test_the_line_about_states() -> None:
    summary = EngineSummary(32768, 40000, 1, 512, "chunked", StartReport({}, 1.0), "cpu", 1)
    line = replace(summary, kv_states=StateBlocks(128, 64, 3 << 19)).line("lfm3")
    assert (
        "(1 full requests); 128 states of 1.5 MiB for 64 requests and their snapshots; scheduler"
        in line
    )
    assert StateBlocks(1, 1, 1 << 20).text() == "1 states of 1 MiB for 1 request"


COUNT_HEAPS = """
import ctypes, os, sys, tempfile, threading
from orca_jax.values.startup import limit_arenas
limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
all_run = threading.Barrier(8)
def allocate():
    libc.malloc(1000)
    all_run.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
    assert libc.malloc_info(0, stream) == 0
    libc.fclose(stream)
    file.seek(0)
    print(file.read().count(b"<heap nr="))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the library of C is not glibc"
)
def test_threads_share_few_heaps() -> None:
    found = subprocess.run(
        [sys.executable, "-c", COUNT_HEAPS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) == 2
