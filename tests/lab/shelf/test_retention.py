"""Retentions of papers in the laboratory: their estimates by hand, clairvoyance as a bound, and the command."""

import json
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.retention import command, page, table
from lab.retention.belady import NextUses
from lab.retention.cachewise import CacheWise
from lab.retention.continuum import Continuum
from lab.retention.estimates import Average, Gaps, LogNormal
from lab.retention.loads import LEASE, LOADS
from lab.retention.runs import BASE, BOUND, PAPERS, RETENTIONS_SHOWN, served
from lab.retention.saecache import SaeCache
from lab.retention.saga import Saga
from lab.shelf.virtual import Call
from orca_jax.policy import KeptSpan
from orca_jax.tools.simulate.check import find_fault
from tests.project.source import ROOT


@pytest.mark.parametrize("name", PAPERS)
def test_each_passes_the_check(name: str) -> None:
    assert find_fault(PAPERS[name], num_cases=16) == ""


def test_estimates() -> None:
    gaps = Gaps(most=3)
    for seconds in (9.0, 1.0, 2.0, 4.0):
        gaps.add(seconds)
    assert list(gaps.values) == [1.0, 2.0, 4.0] and len(gaps) == 3
    assert gaps.share_up_to(2.0) == pytest.approx(2 / 3) and gaps.quantile(0.95) == 4.0
    times = LogNormal(10.0)
    assert times.share_up_to(10.0) == pytest.approx(0.5) and times.share_up_to(0.0) == 0.0
    assert times.chance_within(10.0, 0.0) > times.chance_within(10.0, 100.0) > 0
    for _ in range(300):
        times.add(2.0)
    assert times.share_up_to(3.0) > 0.9 > 0.1 > times.share_up_to(1.0)
    average = Average(10.0, rate=0.5)
    average.add(20.0)
    assert average.value == 15.0


SPAN = KeptSpan(0, 64, 0, 100.0, tenant="t", session="s")


def test_continuum_pins_for_the_time_that_pays_off() -> None:
    tried = Continuum()
    assert tried.keep(SPAN._replace(session=""), 100.0).worth == 0.0
    for _ in range(12):
        tried.used(SPAN, 103.0)
    pinned = tried.keep(SPAN, 100.0)
    assert pinned.worth > 1.0 and pinned.seconds == pytest.approx(3.0), "all gaps are of 3 s"
    assert tried.keep(SPAN, 103.0).worth == 0.0
    later = tried.keep(SPAN._replace(session="z"), 100.0)
    assert 1.0 < later.worth < pinned.worth, "the program that came first is unpinned last"
    assert tried.keep(SPAN._replace(has_ended=True), 100.0).worth < 0


def test_saecache_weighs_its_queues() -> None:
    tried = SaeCache()
    shared = SPAN._replace(is_shared=True)
    assert tried.keep(shared, 100.0).worth > tried.keep(SPAN, 100.0).worth
    assert tried.keep(SPAN._replace(start=4096), 100.0).worth < tried.keep(SPAN, 100.0).worth
    before = tried.keep(shared, 100.0).worth
    for _ in range(20):
        tried.lost(shared, 101.0)
    assert tried.keep(shared, 100.0).worth < before


def test_saga_expects_the_next_step() -> None:
    tried = Saga()
    for program in range(20):
        span = SPAN._replace(session=f"{program}")
        tried.keep(span, 100.0)
        tried.used(span, 101.0)  # all go on after the first step
        tried.keep(span, 100.0)  # and none after the second one
    one = tried.keep(SPAN._replace(session="new"), 100.0)
    two = tried.keep(SPAN._replace(session="0"), 100.0)
    assert one.worth > two.worth > 1.0
    assert tried.keep(SPAN, 100.0 + one.seconds).worth == 0.0


def test_cachewise_gives_up_the_farthest_use() -> None:
    tried = CacheWise()
    slow = SPAN._replace(tenant="slow")
    for _ in range(60):
        tried.used(SPAN, 102.0)
        tried.used(slow, 160.0)
    quick = tried.keep(SPAN, 100.0)
    assert quick.worth > tried.keep(slow, 100.0).worth
    assert quick.seconds == pytest.approx(2.0, abs=0.1)
    assert tried.keep(SPAN, 103.0).worth < quick.worth, "it is overdue"
    assert tried.keep(SPAN, 150.0).worth < -1e6


def test_the_next_uses() -> None:
    uses = NextUses([[b"a", b"b"], [b"c"], [b"a"]])
    assert [uses.of(page) for page in (b"a", b"b", b"c", b"d")] == [0, 0, 1, float("inf")]
    uses.begin(0)
    assert [uses.of(page) for page in (b"a", b"b")] == [2, float("inf")]
    uses.begin(2)
    assert uses.of(b"a") == float("inf")


def test_clairvoyance_keeps_what_comes_next() -> None:
    """Prompts A, B, C in turns, and room for two: the least recently used one is always the next."""
    prompts = [[10 + n] * 160 for n in range(3)]
    calls = [Call(9.0 * n, 160, 2, prompt=prompts[n % 3]) for n in range(24)]
    base = served(calls, BASE, 24)
    best = served(calls, BOUND, 24, range(24))
    assert 2 * base.cached < 9 * 150 < best.cached
    assert best.lost < base.lost


def test_conversations_of_a_trace_are_found(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 2048, "output_length": 64, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 1, "input_length": 2048, "output_length": 64, "hash_ids": [0, 1, 7, 8]},
        {"timestamp": 2, "input_length": 2560, "output_length": 64, "hash_ids": [0, 1, 2, 3, 4]},
    ]
    place = tmp_path / "mooncake_conversation_trace.jsonl"
    place.write_text("".join(json.dumps(each) + "\n" for each in lines))
    programs = [call.program for call in LOADS["mooncake"](1.0, 3, 0, tmp_path)]
    assert programs[0] == programs[2] != programs[1], "two blocks are shared by all"


def test_the_loads() -> None:
    calls = LOADS["agents"](4.0, 60, 0, None)
    for index, call in enumerate(calls):
        assert call.hints is not None and call.hints.wishes == (LEASE,)
        if call.after is not None:
            before = calls[index - 1]
            assert call.after == index - 1 and call.program == before.program
            assert list(call.prompt[: before.num_prompt]) == list(before.prompt)
    ends = [call.hints.ends for call in calls if call.hints is not None]
    assert sum(ends) == len({call.program for call in calls})


def test_the_command_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "SEEDS", (0,))
    monkeypatch.setattr(table, "PAGES", {"agents": (200,), "mooncake": (300,), "azure": (300,)})
    monkeypatch.setattr(command, "PAGES", table.PAGES)
    for place in (command, page):
        monkeypatch.setattr(place, "RESULT", tmp_path / "retention.json")
    flags = ["--num-requests", "40", "--processes", "1"]
    assert main(["retention", *flags, "--traces", str(tmp_path), "--record"]) == 0
    shown = capsys.readouterr().out
    assert "no file of it: mooncake" in shown and "no file of it: azure" in shown
    assert "agents, 200 pages" in shown
    found = json.loads((tmp_path / "retention.json").read_text())
    case = found["loads"]["agents"]["200"]
    assert set(case) == set(RETENTIONS_SHOWN)
    assert max(each["hit_rate"][0] for each in case.values()) == case[BOUND]["hit_rate"][0]
    written = page.block()
    assert "| **FAIL** |" in written and "### Agents with tools, 200 pages" in written
    mine = f"{ROOT}/tests/retention/stranger.py:Frequent"
    assert main(["retention", *flags, "--policy", mine]) == 0
    assert "stranger" in capsys.readouterr().out
    assert main(["retention", *flags, "--policy", "nobody"]) == 2
    assert "policy must be FILE.py:CLASS or one of lru" in capsys.readouterr().err
