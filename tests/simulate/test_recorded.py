"""Recorded requests under other policies: the fit of a cost, its error on the other half, and the page."""

import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from orca_jax.timeline.read import encoded
from orca_jax.tools.bench.workload.records import read_recording
from orca_jax.tools.simulate.__main__ import main
from orca_jax.tools.simulate.recorded import expanded, fit, load_of
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from orca_jax.values.errors import ConfigError

COST = LinearCost(0.02, 2e-4, 0.0)


def recorded(path: Path, count: int = 60) -> str:
    """A recording of a run whose cost is known."""
    dice = random.Random(7)
    load = []
    at = 0.0
    for _ in range(count):
        at += dice.expovariate(3)
        load.append(SimulatedRequest(at, dice.randint(8, 300), dice.randint(2, 30)))
    path.write_bytes(encoded(simulate("chunked", load, COST, max_num_batched_tokens=2048).lines))
    return str(path)


def test_a_known_cost_is_found_from_times_of_requests(tmp_path: Path) -> None:
    requests = read_recording(recorded(tmp_path / "run")).requests
    found = fit(requests, load_of(requests), None, {"max_num_batched_tokens": 2048})
    assert found.is_fitted and isinstance(found.cost, LinearCost)
    assert found.cost.per_iteration == pytest.approx(COST.per_iteration, rel=0.1)
    assert set(found.errors) == {"first token", "per token", "latency"}
    assert max(found.errors.values()) < 0.05


class Tags(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_each_policy_and_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "run<b>", 20)
    out = tmp_path / "page.html"
    words = ["--recorded", path, "--policies", "chunked", "request_level", "--out", str(out)]
    words += ["--jobs", "1"]
    assert main(words) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["policy"] for each in line["runs"]] == ["chunked", "request_level"]
    first, second = (each["median_ttft_ms"] for each in line["runs"])
    assert second > first and line["is_fitted"]
    text = out.read_text()
    tags = Tags()
    tags.feed(text)
    assert not {"script", "link", "img", "iframe", "b"} & {tag for tag, _ in tags.found}
    assert not [each for _, given in tags.found for each in given if each in ("src", "href")]
    assert text.count("<svg") == 2 and text.count("<tr>") == 3 and "url(" not in text


def test_all_stands_for_the_package_and_the_shelf() -> None:
    names = expanded(["all"])
    assert names[:2] == ["orca", "chunked"] and "chunked:deadline" in names
    assert [each for each in names if each.endswith("srpt.py:Srpt")] and len(names) > 14


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (["--recorded", "$file"], "out"),
        (["--recorded", "$file", "--out", "x", "--rate", "2"], "rate"),
        (["--recorded", "$file", "--out", "x", "--seed", "1"], "seed"),
        (["--recorded", "$file", "--out", "x", "--num-requests", "2"], "num_requests"),
        (["--recorded", "$file", "--out", "x", "--tenant", "a"], "tenant"),
        (["--recorded", "$file", "--out", "x", "--jobs", "0"], "jobs"),
        (["--recorded", "$none", "--out", "x"], "recorded"),
        (["chunked", "--out", "x"], "out"),
        (["chunked", "--policies", "all"], "policies"),
        ([], "policies"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    words: list[str], param: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"$file": recorded(tmp_path / "run", 4), "$none": str(tmp_path / "none")}
    assert main([files.get(word, word) for word in words]) == 2
    assert param in capsys.readouterr().err


def test_a_recording_without_times_needs_a_cost() -> None:
    path = Path(__file__).parents[1] / "fixtures" / "records" / "mooncake.jsonl"
    requests = read_recording(str(path)).requests
    with pytest.raises(ConfigError, match="give --cost"):
        fit(requests, load_of(requests), None, {})
    found = fit(requests, load_of(requests), COST, {})
    assert found.cost is COST and not found.is_fitted and not found.errors
