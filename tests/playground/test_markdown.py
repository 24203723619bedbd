"""Markdown of the playground's page, by its own script, where Node.js is there."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orca_jax.serve.playground import page as pages

SCRIPTS = Path(pages.__file__).parent / "page"
RUN = """
class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.parent = null; }
  setAttribute() {}
  append(...made) {
    for (const each of made) if (each instanceof Element) each.parent = this;
    this.children.push(...made);
  }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  get shown() {
    return [this.tag, ...this.children.map((each) => (each instanceof Element ? each.shown : each))];
  }
}
globalThis.document = { createElement: (tag) => new Element(tag) };
const { Markdown } = await import(process.argv[1]);
const body = new Element("div");
const made = new Markdown(body);
const pieces = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (piece) => (text += piece)).on("end", () => done(text));
}));
const start = process.cpuUsage();
for (const piece of pieces) made.add(piece);
const used = process.cpuUsage(start);
console.log(JSON.stringify([body.shown, used.user / 1e6]));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def shown(tmp_path: Path, *pieces: str) -> tuple[list[Any], float]:
    """The elements of a text that arrives in pieces, and the processor time for it."""
    for script in ("markdown.js", "marked.js", "dom.js"):
        shutil.copy(SCRIPTS / script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    command = ["node", "--input-type=module", "-e", RUN, (tmp_path / "markdown.js").as_uri()]
    done = subprocess.run(
        command, input=json.dumps(pieces), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    elements, seconds = json.loads(done.stdout)
    return elements, seconds


@pytest.mark.parametrize("mark", ["> ", ">", "- ", "1. ", "> - "])
def test_deep_quotes_and_lists_are_shown_as_text(tmp_path: Path, mark: str) -> None:
    """Each level is read again by the lexer: 4,000 marks ended in an error, and 1,000 in 1.1 s."""
    text = mark * (4_000 // len(mark)) + "x"
    elements, _ = shown(tmp_path, "before\n\n", text, "\n\n", "*after*")
    assert elements == ["div", ["p", "before"], ["p", text], ["p", ["em", "after"]]]
    _, seconds = shown(tmp_path, *[mark] * (2_000 // len(mark)))
    assert seconds < 1


def test_usual_quotes_and_lists_are_elements(tmp_path: Path) -> None:
    elements, _ = shown(tmp_path, "> a\n> > b\n\n- c\n  - d")
    assert [child[0] for child in elements[1:]] == ["blockquote", "ul"]
