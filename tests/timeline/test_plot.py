"""The content of the pictures, and the burst of the picture in the README."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from orca_jax.llm import LLM
from orca_jax.timeline.measure import Timeline, members
from orca_jax.timeline.palette import KINDS as COLORS
from orca_jax.timeline.palette import SCHEDULERS
from orca_jax.timeline.record import record
from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.burst import mixed_burst, run_burst
from orca_jax.tools.timeline.plot import draw_latencies, draw_timelines, save_figure, title
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from tests.timeline.traced import TracedLab

TOY = EngineConfig(model="preset:toy", max_num_seqs=2, progress=False)


@pytest.fixture
def batch() -> Timeline:
    """Request-level: A with 2 + 1 tokens is kept until B with 2 + 3 has ended, and C waits for both."""
    lab = TracedLab("request_level", max_bs=2)
    for request_id, generated in (("A", 1), ("B", 3), ("C", 1)):
        lab.add(request_id, 2, generated)
    lab.run()
    return lab.timeline


def boxes(axes: Axes) -> dict[str, list[tuple[int, float, float]]]:
    """Colour -> (row, left, right) of its boxes."""
    drawn = [each for each in axes.collections if isinstance(each, PolyCollection)]
    return {
        to_hex(each.get_facecolor()[0]): [
            (
                round((path.get_extents().y0 + path.get_extents().y1) / 2),
                path.get_extents().x0,
                path.get_extents().x1,
            )
            for path in each.get_paths()
        ]
        for each in drawn
    }


def test_a_timeline_by_hand(batch: Timeline) -> None:
    (axes,) = draw_timelines({title(batch): batch}).axes
    assert boxes(axes) == {
        COLORS["chunk"]: [(1, 0, 1), (2, 0, 1), (3, 3, 4)],
        COLORS["repeat"]: [(1, 1, 3)],
        COLORS["increment"]: [(2, 1, 3)],
        COLORS["waiting"]: [(3, 0, 3)],
    }
    (ends,) = axes.lines
    assert ends.get_xydata().tolist() == [[3, 1], [3, 2], [4, 3]], "A is delivered with B"
    assert axes.get_title(loc="left") == "Request-level scheduling, as before Orca (request_level)"
    (counts,) = [text.get_text() for text in axes.texts]
    assert (
        counts.startswith("3 requests, 4 iterations, 0.30 s;")
        and "longer than the shortest" in counts
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["#0", "#1", "#2"]
    assert to_hex(axes.spines["left"].get_edgecolor()) == SCHEDULERS["request_level"].color
    assert title(batch, batch).endswith("s: 100% of the iterations and 100% of the time above")


def test_seconds(batch: Timeline) -> None:
    (axes,) = draw_timelines({"": batch}, "seconds").axes
    origin, last = batch.arrivals[0].at, batch.iterations[-1]
    (chunk,) = [box for box in boxes(axes)[COLORS["chunk"]] if box[0] == 3]
    assert chunk[1:] == pytest.approx(
        (last.collected - last.device - origin, last.collected - origin)
    )
    (ends,) = axes.lines
    assert ends.get_xdata().tolist() == pytest.approx(
        [batch.ends[n].at - origin for n in batch.arrivals]
    )


def test_the_legend_has_exactly_the_drawn_kinds(batch: Timeline) -> None:
    (legend,) = draw_timelines({"": batch}).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert {"prefill (initiation)", "ended, still in the batch"} <= set(
        texts
    ) and "the answer is delivered" in texts
    assert len(texts) == 5, "no request was preempted or idle"


@pytest.mark.parametrize("num_requests", [8, 64])
def test_no_two_texts_touch(num_requests: int, tmp_path: Path) -> None:
    figure = draw_timelines(
        run_burst(TOY, mixed_burst(num_requests, output_tokens=(2, 9)), ["orca"])
    )
    figure.draw_without_rendering()
    for axes in figure.axes:
        for texts in (axes.get_yticklabels(), axes.get_xticklabels()):
            shown = [text.get_window_extent() for text in texts if text.get_text()]
            assert not [pair for pair in itertools.pairwise(shown) if pair[0].overlaps(pair[1])]
    save_figure(figure, str(tmp_path / "out.svg"))
    text = (tmp_path / "out.svg").read_text()
    assert text.startswith("<?xml") and "prefers-color-scheme: dark" in text


def test_latencies_by_hand(batch: Timeline) -> None:
    (axes,) = draw_latencies({"one": batch, "another": batch}).axes
    expected = [
        [row, batch.ends[n].at - batch.arrivals[n].at] for row, n in enumerate(batch.arrivals, 1)
    ]
    assert [line.get_xydata().tolist() for line in axes.lines] == [expected, expected]
    mean = sum(seconds for _, seconds in expected) / 3
    assert axes.get_legend().get_texts()[0].get_text() == f"one (mean {mean:.2f} s)"


def test_wrong_arguments(batch: Timeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one iteration"):
        draw_timelines({})
    with pytest.raises(ConfigError, match="at least one iteration"):
        draw_latencies({"": Timeline(batch.head)})
    with pytest.raises(ConfigError, match="unit must be one of"):
        draw_timelines({"": batch}, "hours")
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        save_figure(draw_latencies({"": batch}), str(tmp_path / "out.jpg"))
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(draw_latencies({"": batch}), str(tmp_path / "no" / "out.png"))


def test_a_burst_is_recorded_whole() -> None:
    burst = mixed_burst(5, prompt_tokens=(2, 9), output_tokens=(1, 7), seed=3)
    asked = [(len(each.prompt_ids), each.num_output) for each in burst]
    runs = run_burst(TOY, burst, ["orca", "request_level", "chunked"])
    for name, run in runs.items():
        assert run.head.config.scheduler == name
        assert [(each.prompt, each.max_tokens) for each in run.arrivals.values()] == asked
        assert [run.ends[n].generated for n in run.arrivals] == [output for _, output in asked]
        assert max(sum(1 for _ in members(each)) for each in run.iterations) == 2


def test_a_recording_begins_and_ends_with_its_block() -> None:
    llm = LLM("preset:toy", progress=False)
    before = llm.engine.observer
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.generate(["before"], params, use_tqdm=False)
    with record(llm) as recording:
        llm.generate(["a", "b"], params, use_tqdm=False)
        assert len(recording.timeline.ends) == 2, "it can be read during the recording"
    llm.generate(["after"], params, use_tqdm=False)
    assert llm.engine.observer is before and len(recording.timeline.arrivals) == 2


def test_recordings_that_would_be_incomplete(tmp_path: Path) -> None:
    llm = LLM("preset:toy", progress=False)
    outputs = llm.stream(["a"], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(ConfigError, match="while the engine is idle"), record(llm):
        pass
    assert len(list(outputs)) == 1
    traced = LLM("preset:toy", progress=False, trace_file=str(tmp_path / "trace"))
    with pytest.raises(ConfigError, match="load_timeline"), record(traced):
        pass


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"prompt_tokens": (0, 3)}, "prompt_tokens"),
        ({"output_tokens": (4, 3)}, "output_tokens"),
    ],
)
def test_wrong_bursts(given: dict, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed_burst(**{"num_requests": 1, **given})
    assert caught.value.param == param


def test_the_burst_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    words = [
        "burst",
        "--model",
        "preset:toy",
        "--num-requests",
        "6",
        "--max-num-seqs",
        "2",
        "--plot",
        str(picture),
    ]
    assert main(words) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["request_level"]["requests"] == line["orca"]["requests"] == 6
    assert line["orca"]["iterations"] < line["request_level"]["iterations"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "orca_jax.tools.timeline.plot")
    assert (
        main(
            [
                "burst",
                "--model",
                "preset:toy",
                "--num-requests",
                "1",
                "--plot",
                str(tmp_path / "out.png"),
            ]
        )
        == 2
    )
    assert "pip install 'orca-jax[plot]'" in capsys.readouterr().err
