// Small helpers for the document. All texts go through `textContent` or text nodes, never through HTML.

export const find = (id) => document.getElementById(id);

/** Make an element. Attributes that begin with "on" are listeners; true sets an empty attribute, false and null none. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const button = (text, onclick, attributes = {}) =>
  element("button", { type: "button", class: "quiet", onclick, ...attributes }, text);

/** A function that lets `draw` run in a coming frame, once for all calls before it, and at most a quarter of the time. */
export function paced(draw) {
  let [isWaiting, next] = [false, 0];
  const frame = () => {
    const begun = performance.now();
    if (begun < next) {
      requestAnimationFrame(frame);
      return;
    }
    isWaiting = false;
    draw();
    const now = performance.now();
    next = now + 3 * (now - begun);
  };
  return () => {
    if (!isWaiting) requestAnimationFrame(frame);
    isWaiting = true;
  };
}

/** True for a key that sends the text of a field. */
export const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/** Say something to screen readers. */
export function announce(text) {
  find("status").textContent = text;
}

/** Let the buttons of a group choose one value; `choose` is called with it. Returns a function that sets the value. */
export function segments(group, attribute, choose) {
  const buttons = [...group.querySelectorAll("button")];
  const set = (value) => {
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset[attribute] === value));
    choose(value);
  };
  for (const each of buttons) each.addEventListener("click", () => set(each.dataset[attribute]));
  return set;
}

/** Copy a text, or show it if the browser does not allow that (it needs HTTPS or localhost). */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    announce(`${what} copied`);
  } catch {
    find("text").value = text;
    find("text-dialog").showModal();
    find("text").select();
  }
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
