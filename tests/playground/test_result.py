"""The figures of a burst that has ended, by Node.js: seconds beside iterations, by hand."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orca_jax.serve.playground.page import FOLDER
from orca_jax.timeline.palette import PAGE_FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All modules of the page in one folder, as the server shows them."""
    for source in (FOLDER, PAGE_FOLDER):
        for file in source.glob("*.js"):
            shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


def evaluate(folder: Path, module: str, expression: str, value: object) -> Any:
    """The value of an expression with the names of a module, and `value`."""
    imports = f"import * as m from './{module}'; import * as s from './scale.js';"
    script = (
        f"{imports} const value = {json.dumps(value)}; console.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        [str(NODE), "--input-type=module", "-e", script],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_seconds_are_those_of_answers_and_of_plain_iterations(folder: Path) -> None:
    """Two answers after 1.0 and 2.0 s; iterations without prefill take 0.2 and 0.3 s, one with prefill 1.1 s."""
    iterations = [
        {"collected": 10.0, "chunks": [[0, 0, 5, True]]},
        {"collected": 11.1, "chunks": [[1, 0, 5, True]]},
        {"collected": 11.3, "chunks": []},
        {"collected": 11.6, "chunks": []},
    ]
    arrivals = [{"n": 3, "at": 9.0}, {"n": 4, "at": 9.5}]
    ends = [{"n": 3, "at": 10.0}, {"n": 4, "at": 11.5}]
    lines = {"arrivals": arrivals, "iterations": iterations, "ends": ends}
    found = evaluate(folder, "result.js", "m.secondsOf(value, 20)", lines)
    assert found == pytest.approx({"here": 1.5, "there": 20 * 0.25, "pace": 0.25})
    alone = evaluate(
        folder, "result.js", "m.secondsOf(value, 20)", {**lines, "iterations": iterations[:2]}
    )
    assert alone["pace"] == pytest.approx(1.1), "without plain iterations all count"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("m.timeText(1.92)", "1.9 s"),
        ("m.timeText(0.0274)", "27 ms"),
        ("m.timeText(0.274)", "274 ms"),
        ("m.timeText(0.0004)", "0.4 ms"),
        ("m.shareText(99, 217)", "less than half of the iterations"),
        ("m.shareText(150, 200)", "75 % of the iterations"),
        ("m.shareText(200, 200)", "about all of the iterations"),
    ],
)
def test_words(folder: Path, call: str, expected: str) -> None:
    assert evaluate(folder, "result.js", call, None) == expected


def test_the_fullest_iteration_is_the_first_with_most_requests(folder: Path) -> None:
    columns = [
        {"id": 0, "members": [1]},
        {"id": 1, "members": [1, 2]},
        {"id": 2, "members": [3, 4]},
    ]
    assert evaluate(folder, "result.js", "m.fullestOf(value).id", columns) == 1
    assert evaluate(folder, "result.js", "m.fullestOf(value)", []) is None


# a canvas that draws nothing
CONTEXT = "new Proxy({}, { get: () => () => ({ width: 1 }), set: () => true })"
AXES = f"""(() => {{
  const ends = [];
  const layout = m.layoutOf({{ width: 900, height: 168 }}, 0);
  for (const until of value) {{
    const scale = {{ ...s.evenScale(0, 8, (column) => column), ticks: (_, end) => (ends.push(end), []) }};
    m.drawChart({{ context: {CONTEXT} }}, [], {{ scale, until, end: 100, layout }}, {{ colors: [] }});
  }}
  return ends;
}})()"""


def test_both_axes_end_at_the_same_iteration(folder: Path) -> None:
    """The run of the engine ends at 30 of 100 iterations; its axis goes on as that of the comparison does."""
    assert evaluate(folder, "draw.js", AXES, [30, 100]) == [100, 100]
