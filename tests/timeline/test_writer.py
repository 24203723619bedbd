"""Timelines of an engine, by hand."""

import json
import os
from pathlib import Path

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.sim.toy_memory import toy_span
from orca_jax.timeline.read import load_timeline
from orca_jax.timeline.writer import TimelineFile
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams, Urgency
from orca_jax.values.step import SpannedPrompt
from tests.sched.lab import Shape
from tests.timeline.traced import ONE, TracedLab


def test_iterations_by_hand() -> None:
    """The first row of the table in `tests/sched/test_chunked.py`."""
    lab = TracedLab(max_bs=2, shape=ONE._replace(budget=4))
    lab.add("A", 3, 4)
    lab.add("B", 7, 2)
    lab.run()
    run = lab.timeline
    assert [(a.n, a.request_id, a.prompt, a.max_tokens) for a in run.arrivals.values()] == [
        (0, "A", 3, 4),
        (1, "B", 7, 2),
    ]
    shown = [
        (i.increments, i.chunks, i.tokens, i.running, i.waiting, i.held, i.free_pages)
        for i in run.iterations
    ]
    assert shown == [
        ([], [(0, 0, 3, True), (1, 0, 1, False)], 4, 2, 0, None, 30),
        ([(0, 3)], [(1, 1, 3, False)], 4, 2, 0, None, 30),
        ([(0, 4)], [(1, 4, 3, True)], 4, 2, 0, None, 28),
        ([(0, 5), (1, 7)], [], 2, 2, 0, None, 28),
    ]
    assert {n: (end.reason, end.generated) for n, end in run.ends.items()} == {
        0: ("length", 4),
        1: ("length", 2),
    }


def test_times_by_hand() -> None:
    """The clock is read at start, arrival, selecting, plan, planned, submitted, collected, and twice more."""
    lab = TracedLab(max_bs=1, shape=ONE)
    lab.add("A", 3, 2)
    lab.run()
    first, second = lab.timeline.iterations
    assert (first.selected, first.planned, first.submitted, first.collected) == (
        0.03,
        0.05,
        0.06,
        0.07,
    )
    assert first.device == pytest.approx(0.02) and first.update == pytest.approx(0.02)
    assert second.device == pytest.approx(second.collected - second.planned)


def test_overlapping_iterations_share_no_device_time() -> None:
    lab = TracedLab(max_bs=1, shape=ONE._replace(depth=2))
    lab.add("A", 3, 6)
    lab.run()
    iterations = lab.timeline.iterations
    assert iterations[1].planned < iterations[0].collected, "there is no overlap to test"
    assert iterations[1].device == pytest.approx(iterations[1].collected - iterations[0].collected)


HELD = {
    "rows": (
        {"max_bs": 1, "shape": ONE._replace(budget=8)},
        [("A", 2, 2), ("B", 2, 1)],
        ["rows", "rows", None],
    ),
    "budget": (
        {"max_bs": 3, "shape": ONE._replace(budget=5)},
        [("A", 12, 1), ("B", 2, 1)],
        ["budget", "budget", None],
    ),
    "pages": (
        {"max_bs": 2, "page_size": 2, "shape": ONE._replace(budget=7, num_pages=4)},
        [("A", 6, 2), ("B", 3, 1)],
        ["pages", "pages", None],
    ),
    "slots": ({"max_bs": 2, "n_slots": 10}, [("A", 6, 2), ("B", 3, 1)], ["pages", "pages", None]),
}


@pytest.mark.parametrize("case", HELD)
def test_the_reason_of_waiting(case: str) -> None:
    sizes, requests, held = HELD[case]
    lab = TracedLab(**sizes)
    for request in requests:
        lab.add(*request)
    lab.run()
    assert [iteration.held for iteration in lab.timeline.iterations] == held


def test_a_running_batch_admits_no_request() -> None:
    lab = TracedLab("request_level", max_bs=3)
    lab.add("A", 2, 3)
    lab.add("B", 2, 1)
    lab.step()
    lab.add("C", 2, 1)
    lab.run()
    run = lab.timeline
    assert [iteration.held for iteration in run.iterations] == [None, "batch", "batch", None]
    assert [iteration.repeats for iteration in run.iterations[1:3]] == [[(1, 1, 1)], [(1, 1, 1)]]


def test_preemption() -> None:
    lab = TracedLab(max_bs=2, page_size=2, shape=ONE._replace(budget=8, num_pages=4))
    lab.add("A", 3, 4)
    lab.add("B", 3, 4)
    lab.run()
    run = lab.timeline
    assert [iteration.preempted for iteration in run.iterations] == [[], [], [1], [], [], []]
    assert run.iterations[2].held == "pages"
    assert run.iterations[4].chunks == [(1, 0, 5, True)], "its tokens are recomputed"


def test_aborts() -> None:
    lab = TracedLab(max_bs=1, shape=ONE)
    lab.add("A", 3, 9)
    lab.add("B", 3, 9)
    lab.step()
    lab.engine.abort("A")
    lab.engine.abort("B")
    lab.run()
    assert {n: (end.reason, end.generated) for n, end in lab.timeline.ends.items()} == {
        0: ("abort", 1),
        1: ("abort", 0),
    }


def test_shared_pages_have_equal_numbers() -> None:
    lab = TracedLab(max_bs=1, page_size=2, shape=Shape(depth=1))
    params = SamplingParams(max_tokens=1, temperature=0)
    for request_id, prompt in {
        "A": [1, 2, 3, 4, 5],
        "B": [1, 2, 3, 4, 9],
        "C": [1, 2, 9, 9, 9],
    }.items():
        lab.engine.add_request(request_id, prompt, params)
        lab.run()
    a, b, c = (lab.timeline.ends[n].pages for n in range(3))
    assert a[:2] == b[:2] and a[0] == c[0] and a[1] != c[1], "full pages"
    assert len({a[2], b[2], c[2]}) == len([a, b, c]), "the tokens after them"
    assert [lab.timeline.ends[n].cached for n in range(3)] == [0, 4, 2]


def test_hashes_are_keyed_by_a_secret_of_the_run() -> None:
    """Two runs in one process have the same hash seed of Python, and different hashes of the same content."""
    runs = []
    for _ in range(2):
        lab = TracedLab(max_bs=1, page_size=2, shape=Shape(depth=1))
        for number in range(2):
            lab.engine.add_request(
                str(number),
                [1, 2, 3],
                SamplingParams(max_tokens=1),
                urgency=Urgency(tenant="a-secret-key"),
            )
        lab.run()
        runs.append(lab.timeline)
    (pages, tenant), (other_pages, other_tenant) = (
        (run.ends[0].pages, run.arrivals[0].tenant) for run in runs
    )
    assert set(pages).isdisjoint(other_pages) and tenant != other_tenant
    assert runs[0].ends[1].pages == pages and runs[0].arrivals[1].tenant == tenant, (
        "equal within a run"
    )
    assert hash("a-secret-key") not in (tenant, other_tenant)
    assert all(-(2**63) <= number < 2**63 for number in (*pages, tenant)), (
        "an integer of 64 bits for other readers"
    )


def traced_toy(path: Path, **settings) -> None:
    config = EngineConfig(model="preset:toy", scheduler="chunked", trace_file=str(path), **settings)
    engine = build_engine(config).engine
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.add_request(
        "one", [201, 202, 203, 204], params, urgency=Urgency(priority=3, tenant="a-secret-key")
    )
    engine.add_request("two", [201, 202], params)
    while engine.has_work:
        engine.step()


def test_everything_is_in_the_file_when_the_engine_is_idle(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced_toy(path)
    run = load_timeline(str(path))
    assert [arrival.priority for arrival in run.arrivals.values()] == [3, 0]
    assert len(run.ends) == 2 and sum(len(each.increments) for each in run.iterations) == 4


def test_the_file_has_neither_ids_nor_names_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced_toy(path)
    text = path.read_text()
    arrivals = [line["arrival"] for line in map(json.loads, text.splitlines()) if "arrival" in line]
    assert [set(arrival) for arrival in arrivals] == [
        {
            "n",
            "request_id",
            "at",
            "prompt",
            "max_tokens",
            "priority",
            "tenant",
            "deadline",
            "predicted",
            "spans",
            "call",
            "shared",
        }
    ] * 2
    assert [arrival["prompt"] for arrival in arrivals] == [4, 2], "counts, not ids"
    assert "secret" not in text and "201,202" not in text
    assert (
        isinstance(arrivals[0]["tenant"], int)
        and arrivals[0]["tenant"] != 0 == arrivals[1]["tenant"]
    )


def test_vector_spans_have_places_and_pages_of_their_own() -> None:
    """The pages of equal digests have equal numbers, and those before a span too; ids alone say nothing."""
    lab = TracedLab(max_bs=1, page_size=4, shape=ONE._replace(reuses_prefixes=True))
    greedy = SamplingParams(max_tokens=1, temperature=0)
    ids = tuple(range(14))
    for name, first in (("a", 5), ("b", 5), ("c", 6)):
        span = toy_span(5, 6, name, first)
        lab.engine.add_request(name, SpannedPrompt(ids, (span,)), greedy)
    lab.engine.add_request("plain", ids, greedy)
    lab.run()
    run = lab.timeline
    assert [run.arrivals[n].spans for n in range(4)] == [((5, 6),)] * 3 + [()]
    a, b, c, plain = (run.ends[n].pages for n in range(4))
    assert a == b and len(a) == 4
    assert a[0] == c[0] == plain[0]
    assert not {*a[1:]} & {*c[1:]} and not {*a[1:], *c[1:]} & {*plain[1:]}
    assert [run.ends[n].cached for n in range(4)] == [0, 13, 4, 4]


def test_a_second_engine_appends_and_the_last_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced_toy(path, max_num_seqs=8)
    traced_toy(path, max_num_seqs=9)
    assert path.read_text().count('"head"') == 2
    run = load_timeline(str(path))
    assert run.head.config.max_num_seqs == 9 and len(run.arrivals) == 2


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as error:
        build_engine(
            EngineConfig(model="preset:toy", trace_file=str(tmp_path / "nowhere" / "trace"))
        )
    assert error.value.param == "trace_file"


def test_a_pipe_would_block_the_engine(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(ConfigError, match="is not a regular file") as error:
        TimelineFile(str(tmp_path / "trace"))
    assert error.value.param == "trace_file"


def test_a_disk_that_fails_later_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    engine = build_engine(EngineConfig(model="preset:toy", trace_file=str(folder / "trace"))).engine
    (folder / "trace").unlink()
    folder.rmdir()
    engine.add_request("one", [1, 2], SamplingParams(max_tokens=2, temperature=0))
    ends = []
    while engine.has_work:
        ends += [update.finish_reason for update in engine.step()]
    assert ends[-1] in ("length", "stop") and "timeline are lost" in caplog.text
