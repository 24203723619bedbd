"""The table of schedulers beside ORCA: virtual time is exact, so each recorded digit is found again."""

import json
from dataclasses import replace

import pytest

from lab.baselines import POLICIES
from lab.paper.places import Place
from lab.paper.runs import paper_lengths
from lab.paper.sweep import saturation
from lab.paper.systems import parse_system
from lab.reproduce.baselines import EFFORT, HEAD, RESULT, SYSTEMS, baselines, block, rows
from orca_jax.helpers.reporting import rounded

RECORDED = json.loads(RESULT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["prefill_first(32)", "padded(8)"])
def test_a_saturation_is_found_again(name: str) -> None:
    system = parse_system(name, POLICIES)
    found = saturation(system, Place(), paper_lengths(EFFORT.of(system), EFFORT.seed))
    assert (
        rounded({"found": found})["found"] == RECORDED["systems"][name]["saturation_requests_per_s"]
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_is_found_again() -> None:
    assert rounded(baselines(replace(EFFORT, processes=2))) == RECORDED


def test_the_table_has_a_row_for_each_system_and_no_latency_above_a_saturation() -> None:
    assert list(RECORDED["systems"]) == list(SYSTEMS) and RECORDED["requests"] == EFFORT.requests
    for line, figures in zip(rows(RECORDED), RECORDED["systems"].values(), strict=True):
        assert len(line) == len(HEAD)
        assert [figures["saturation_requests_per_s"] > rate for rate in (2.0, 5.0)] == [
            bool(line[4]),
            bool(line[8]),
        ]
    assert len(block().splitlines()) == 2 + len(SYSTEMS)
