"""The views of a timeline, and the command line."""

import json
from pathlib import Path

import pytest

from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.spans import request_spans
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.tools.timeline.__main__ import main
from orca_jax.tools.timeline.fit import Fit, fit_cost
from orca_jax.tools.timeline.perfetto import perfetto
from tests.timeline.traced import ONE, TracedLab

HOSTILE = "<script>alert('B')</script>"


@pytest.fixture
def lab() -> TracedLab:
    """Three requests: A, a preempted one with a malicious name, and a waiting C."""
    lab = TracedLab(max_bs=2, page_size=2, shape=ONE._replace(budget=8, num_pages=4))
    for request_id in ("A", HOSTILE, "C"):
        lab.add(request_id, 3, 4)
    lab.run()
    return lab


@pytest.fixture
def run(lab: TracedLab) -> Timeline:
    return lab.timeline


@pytest.fixture
def file(lab: TracedLab, tmp_path: Path) -> Path:
    lab.writer.flush()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lab.parts))
    return path


def test_spans_by_hand(run: Timeline) -> None:
    shown = {
        n: [(s.kind, s.first, s.last, s.tokens) for s in spans]
        for n, spans in request_spans(run).items()
    }
    assert shown[0] == [("chunk", 0, 0, 3), ("increment", 1, 3, 3)]
    assert shown[1] == [
        ("chunk", 0, 0, 3),
        ("increment", 1, 1, 1),
        ("preempted", 2, 3, 0),
        ("chunk", 4, 4, 5),
        ("increment", 5, 5, 1),
    ]
    assert shown[2] == [
        ("waiting", 0, 1, 0),
        ("waiting", 2, 5, 0),
        ("chunk", 6, 6, 3),
        ("increment", 7, 9, 3),
    ]
    assert [span.held for span in request_spans(run)[2]] == ["rows", "pages", None, None]


def test_no_span_after_the_end() -> None:
    """With two iterations in flight, an end token is noticed one iteration late: A is computed once more, in vain."""
    lab = TracedLab(max_bs=2, shape=ONE._replace(depth=2, budget=8), eos=(43,))
    lab.add("A", 3, 6)
    lab.add("B", 4, 6)
    lab.run()
    assert lab.tokens["A"] == [20, 43], "its second token is the end token"
    shown = {
        n: [(s.kind, s.first, s.last) for s in spans]
        for n, spans in request_spans(lab.timeline).items()
    }
    assert shown[0] == [("chunk", 0, 0), ("increment", 1, 1), ("repeat", 2, 2)]
    assert shown[1] == [("chunk", 0, 0), ("increment", 1, 5)]


def test_increments_are_joined_only_if_they_are_neighbours() -> None:
    lab = TracedLab()
    lab.add("A", 3, 9)
    lab.run()
    run = lab.timeline
    run.iterations[3].proposed = [(0, 2)]  # as with speculation, where both are refused
    shown = [
        (span.kind, span.first, span.last, span.start, span.tokens)
        for span in request_spans(run)[0]
    ]
    assert shown == [
        ("chunk", 0, 0, 0, 3),
        ("increment", 1, 2, 3, 2),
        ("increment", 3, 3, 5, 3),
        ("increment", 4, 8, 6, 5),
    ]


def test_perfetto(run: Timeline) -> None:
    events = json.loads(json.dumps(perfetto(run)))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"0: A", f"1: {HOSTILE}", "2: C", "host", "device"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    device = [event for event in slices if (event["pid"], event["tid"]) == (1, 2)]
    assert [event["name"] for event in device] == [
        f"iteration {each.iteration}" for each in run.iterations
    ]
    for n in run.arrivals:
        track = [event for event in slices if (event["pid"], event["tid"]) == (2, n + 1)]
        assert len(track) == len(request_spans(run)[n])
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "tokens",
        "running",
        "waiting",
        "free pages",
    }


def test_show(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, events = tmp_path / "out.html", tmp_path / "out.json"
    assert main([str(file), "--html", str(html), "--perfetto", str(events)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        line["requests"] == 3
        and line["preemptions"] >= 1
        and line["config"]["scheduler"] == "chunked"
    )
    assert (
        html.read_text().startswith("<!doctype html>")
        and json.loads(events.read_text())["traceEvents"]
    )


def test_the_timeline_itself_is_not_overwritten(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    for flag in ("--html", "--perfetto", "--plot"):
        assert main([str(file), flag, f"{file.parent}/./{file.name}"]) == 2
        assert "is the timeline itself; choose another file" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_view_replaces_the_older_one_at_its_end(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "out.html"
    html.write_text("old")
    html.chmod(0o640)

    def fail(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        assert main([str(file), "--html", str(html)]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert html.read_text() == "old" and {path.name for path in tmp_path.iterdir()} == {
        file.name,
        "out.html",
    }
    assert main([str(file), "--html", str(html)]) == 0
    assert html.read_text().startswith("<!doctype html>") and html.stat().st_mode & 0o777 == 0o640
    assert main([str(file), "--html", "/dev/null"]) == 0 and Path("/dev/null").is_char_device()


def test_replay(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "out.html"
    words = [
        "replay",
        str(file),
        "--scheduler",
        "orca",
        "--scheduling-policy",
        "fcfs",
        "--n-slots",
        "7",
    ]
    assert bench([*words, "--num-pages", "8", "--html", str(html)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["replayed"]["requests"] == line["recorded"]["requests"] == 3
    assert line["replayed"]["preemptions"] == 0 < line["recorded"]["preemptions"]
    assert line["replayed"]["mean_batch_size"] == 1, "two requests of 7 slots each"
    assert line["fit"]["per_iteration"] > 0 and line["config"]["n_slots"] == 7
    assert "orca" in html.read_text()


def test_a_replay_by_an_unsound_fit_is_marked(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for r_squared, is_marked in ((0.01, True), (0.79, True), (0.8, False)):
        monkeypatch.setattr(
            "orca_jax.tools.bench.replay.fit_cost",
            lambda run, r=r_squared: Fit(fit_cost(run).cost, r),
        )
        assert bench(["replay", str(file)]) == 0
        *text, line = capsys.readouterr().out.splitlines()
        warnings = [row for row in text if row.startswith("warning: ")]
        assert len(warnings) == is_marked
        expected = warnings[0].removeprefix("warning: ") if is_marked else None
        assert json.loads(line)["fit"]["warning"] == expected


WRONG = {
    "no file": (None, "cannot be read"),
    "empty": (b"", "holds no timeline"),
    "no JSON": (b"hello\n", "line 1"),
    "no head": (b'{"iteration": null}\n', "not the head of a timeline"),
    "no request": ("head", "nothing to measure"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = WRONG[case]
    path = file.with_name("wrong")
    if content is not None:
        path.write_bytes(
            file.read_bytes().splitlines(keepends=True)[0] if content == "head" else content
        )
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_another_version(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes().replace(b'"version":4', b'"version":99'))
    assert main([str(file)]) == 2
    assert "version 99" in capsys.readouterr().err


def test_an_unfinished_last_line_is_left_out(
    file: Path, run: Timeline, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(file.read_bytes() + b'{"iteration":{"iterat')
    assert main([str(file)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["iterations"] == len(run.iterations)


def test_a_wrong_setting(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["replay", str(file), "--max-num-seqs", "0"]) == 2
    assert "max_num_seqs must be at least 1" in capsys.readouterr().err
