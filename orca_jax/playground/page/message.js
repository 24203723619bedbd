// One message on the page: its text, its figures and its actions.

import { button, element } from "./dom.js";
import { listen, setButtons, TokenText } from "./tokens.js";

const NAMES = {
  chat: { user: "You", assistant: "Model" },
  prompt: { user: "Prompt", assistant: "Continuation" },
};

/** A message of the reader, with an action that replaces it and all that follows. */
export function userMessage(message, mode, onEdit) {
  const body = element("div", { class: "body" }, message.content);
  const edit = button("Edit", () => editor.start());
  const foot = element("div", { class: "foot" }, edit);
  const made = element("article", { class: "message user" }, element("h3", {}, NAMES[mode].user), body, foot);
  const editor = {
    start() {
      const field = element("textarea", { rows: 3, "aria-label": "New text of the message" });
      field.value = message.content;
      const close = () => made.replaceChildren(made.firstChild, body, foot);
      const save = () => {
        close();
        onEdit(field.value);
      };
      const actions = element("div", { class: "foot" }, button("Send again", save), button("Cancel", close));
      made.replaceChildren(made.firstChild, field, actions);
      field.focus();
    },
  };
  return made;
}

/** A message of the model while it arrives. Its actions appear at its end. */
export class Answer {
  constructor(mode, actions) {
    this.body = element("div", { class: "body" });
    this.stats = element("span", { class: "stats" });
    this.foot = element("div", { class: "foot" }, this.stats);
    this.actions = actions;
    const title = element("h3", {}, NAMES[mode].assistant);
    this.element = element("article", { class: "message", "aria-busy": "true" }, title, this.body, this.foot);
    this.text = new TokenText(this.body);
    listen(this.body);
  }

  add(text, tokens) {
    this.text.add(text, tokens);
  }

  showStats(text) {
    this.stats.textContent = text;
  }

  end(error) {
    this.element.removeAttribute("aria-busy");
    if (error) this.body.after(element("p", { class: "error", role: "alert" }, error));
    const buttons = this.actions.map(([text, act]) => button(text, act));
    if (this.body.querySelector(".token")) {
      const toggle = button("Tokens", () => {
        const isOn = toggle.getAttribute("aria-pressed") !== "true";
        toggle.setAttribute("aria-pressed", String(isOn));
        setButtons(this.body, isOn);
      }, { "aria-pressed": "false", title: "Move through the tokens with the arrow keys" });
      buttons.push(toggle);
    }
    this.foot.append(...buttons);
  }
}
