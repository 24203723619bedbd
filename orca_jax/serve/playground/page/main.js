// The start of the page: settings, theme, and the two halves.

import { Failure, NoKey } from "./api.js";
import { Chat, loadSettings } from "./chat.js";
import { Decide } from "./decide.js";
import { find, isSend, segments } from "./dom.js";
import { EngineView } from "./engine.js";
import { showParameters } from "./parameters.js";

const THEMES = ["auto", "light", "dark"];
const RETRY_MS = 2000;

let engine = null;

function showState(text, isBad = false) {
  find("state").textContent = text;
  find("state").classList.toggle("bad", isBad);
}

function setTheme(theme) {
  localStorage.setItem("orca-theme", theme);
  find("theme").querySelector("span:last-child").textContent = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  engine?.retheme();
}

/** Wait for the button, or for Enter in the field of messages: the reader wants to give a key after all. */
async function anotherTry() {
  const [waits, retry] = [new AbortController(), find("retry")];
  retry.hidden = false;
  await new Promise((resolve) => {
    const on = (name, event, wants = () => true) => {
      find(name).addEventListener(event, (each) => {
        if (!wants(each)) return;
        each.preventDefault();
        resolve();
      }, { signal: waits.signal });
    };
    on("retry", "click");
    on("composer", "submit");
    on("input", "keydown", isSend);
  });
  waits.abort();
  retry.hidden = true;
}

/** Wait until the server has loaded its model and the reader has given a key, if one is needed. */
async function settingsOfServer() {
  for (;;) {
    try {
      return await loadSettings();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      showState(error.message, true);
      if (error instanceof NoKey) {
        await anotherTry();
      } else {
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }
}

segments(find("panes"), "pane", (pane) => {
  document.body.dataset.pane = pane;
  engine?.redraw();
});
setTheme(THEMES.includes(localStorage.getItem("orca-theme")) ? localStorage.getItem("orca-theme") : "auto");
find("theme").addEventListener("click", () => {
  const now = localStorage.getItem("orca-theme");
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});

const settings = await settingsOfServer();
find("model").textContent = settings.model;
document.title = `${settings.model}: orca-jax playground`;
showParameters(settings);
engine = new EngineView(settings, (state) => showState(state, state === "no connection"));
new Chat(settings, engine);
new Decide(engine);
if (location.hash) find("panes").querySelector("[data-pane=engine]").click(); // a link to a burst
if (matchMedia("(hover: hover)").matches) find("input").focus(); // a touch keyboard would cover the page
