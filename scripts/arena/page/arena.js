// The page of the arena: two policies on one load, and the labs of the course.

import { editor } from "./editor.js";
import { labView } from "./lab.js";
import { button, element, find, showPage } from "./parts.js";
import { Python } from "./python.js";

const OWN = "engine: "; // schedulers of the engine, whose code is no policy
const FIRST = ["orca", `${OWN}request_level`];

const states = { loading: "Loading Python", ready: "Ready", running: "Running", failed: "Python cannot run here" };
const python = new Python((state, reason = "") => {
  find("state").textContent = reason ? `${states[state]}: ${reason}` : states[state];
  document.body.dataset.state = state;
  for (const each of document.querySelectorAll("[data-stops]")) each.disabled = state !== "running";
});
find("stop").dataset.stops = "";
find("stop").addEventListener("click", () => python.stop());

const { policies, own, labs } = await fetch("content.json").then((answer) => answer.json());

/** The choice of a policy and its text. */
function policyOf(side) {
  const place = document.querySelector(`[data-side="${side}"]`);
  const name = ["First", "Second"][side];
  const titles = [...Object.keys(policies), ...own.map((each) => OWN + each)];
  const select = element("select", { "aria-label": `${name} policy` }, ...titles.map((each) => element("option", {}, each)));
  const field = element("textarea", { spellcheck: "false", autocapitalize: "off", "aria-label": `Text of the ${name.toLowerCase()} policy` });
  const note = element("p", { class: "own muted" }, "A scheduler of the engine itself. Choose one of the others to edit it.");
  const reset = button("Reset", () => text.reset(), { class: "quiet" });
  const text = editor(field, (isChanged) => (reset.hidden = !isChanged));
  const show = () => {
    const isOwn = select.value.startsWith(OWN);
    field.hidden = isOwn;
    note.hidden = !isOwn;
    reset.hidden = true;
    if (!isOwn) text.load(`${side} ${select.value}`, policies[select.value]);
  };
  select.value = FIRST[side];
  select.addEventListener("change", show);
  place.append(element("div", { class: "bar" }, element("b", {}, name), select, reset), field, note);
  show();
  return () => {
    const isOwn = select.value.startsWith(OWN);
    return { name: select.value.replace(OWN, ""), text: isOwn ? "" : text.text };
  };
}

const chosen = [policyOf(0), policyOf(1)];

function say(text, isBad = true) {
  find("fault").hidden = !text;
  find("fault").textContent = text;
  find("fault").classList.toggle("bad", isBad);
}

async function run() {
  const load = Object.fromEntries([...new FormData(find("load"))].map(([name, value]) => [name, Number(value)]));
  const { answer, fault } = await python.call("compare", { policies: chosen.map((each) => each()), load });
  say(fault ?? "");
  if (answer) showPage(find("picture"), answer.html);
}

find("load").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
find("check").addEventListener("click", async () => {
  const policy = chosen[0]();
  if (!policy.text) return say("Choose a policy with a text to check it.");
  const { answer, fault } = await python.call("check", policy);
  say(fault ?? answer.text, fault !== undefined || answer.isFault);
});

const views = [["Arena", "arena", null], ...labs.map((lab, index) => [`Lab ${index + 1}`, `lab-${index + 1}`, lab])];
const tabs = views.map(([title, hash]) => element("button", { type: "button", onclick: () => (location.hash = hash) }, title));
find("views").append(...tabs);

function showView() {
  const index = Math.max(0, views.findIndex(([, hash]) => location.hash === `#${hash}`));
  const lab = views[index][2];
  tabs.forEach((tab, number) => tab.setAttribute("aria-pressed", String(number === index)));
  python.stop();
  find("arena").hidden = lab !== null;
  find("lab").hidden = lab === null;
  find("lab").replaceChildren(...(lab ? labView(lab, python) : []));
}

addEventListener("hashchange", showView);
showView();
run();
