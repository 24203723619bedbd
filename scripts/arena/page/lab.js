// A lab of the course: its cells, the reader's part as a field, and the check.

import { editor } from "./editor.js";
import { button, element, showPage } from "./parts.js";

/** The elements of a lab; `lab` is {name, cells: [{kind: "text", html} or {kind: "part" or "code", text}]}. */
export function labView(lab, python) {
  const output = element("p", { class: "output", role: "status", hidden: "" });
  const frame = element("iframe", { title: "The iterations of your run", hidden: "" });
  let part = null;
  const cells = lab.cells.map((cell) => {
    if (cell.kind === "text") return textOf(cell.html);
    if (cell.kind === "code") return element("div", { class: "cell" }, element("pre", { tabindex: "0" }, cell.text));
    const field = element("textarea", { spellcheck: "false", autocapitalize: "off", "aria-label": "Your part" });
    part = editor(field);
    part.load(lab.name, cell.text);
    return field;
  });

  async function check() {
    const texts = lab.cells.filter(({ kind }) => kind !== "text").map(({ kind, text }) => (kind === "part" ? part.text : text));
    const { answer, fault } = await python.call("run_lab", texts);
    output.hidden = false;
    output.textContent = fault ?? answer.text;
    output.classList.toggle("bad", fault !== undefined);
    frame.hidden = true;
    if (answer?.html) showPage(frame, answer.html);
  }

  const stop = button("Stop", () => python.stop(), { "data-stops": "" });
  stop.disabled = true;
  const bar = element("div", { class: "bar" }, button("Run the check", check, { class: "main" }), stop, button("Reset", () => part.reset(), { class: "quiet" }));
  return [...cells, bar, output, frame];
}

/** The text of a cell, which the build has made of the notebook. */
function textOf(html) {
  const place = element("div", { class: "text" });
  place.innerHTML = html;
  return place;
}
