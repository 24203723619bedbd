// One message on the page: its text, its figures and its actions.

import { button, element, paced } from "./dom.js";
import { Markdown } from "./markdown.js";
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

/**
 * A message of the model while it arrives: Markdown in a chat, and tokens in a continuation. Its actions appear at its end.
 *
 * around(show): calls `show`, which changes the page, and keeps the end of the conversation in view.
 */
export class Answer {
  constructor(mode, actions, around = (show) => show()) {
    this.mode = mode;
    this.actions = actions;
    this.body = element("div", { class: "body" });
    this.stats = element("span", { class: "stats" });
    this.foot = element("div", { class: "foot" }, this.stats);
    this.thought = document.createTextNode("");
    this.thinking = element("details", { class: "thinking", hidden: true }, element("summary", {}, "Thinking"), element("div", {}, this.thought));
    const title = element("h3", {}, NAMES[mode].assistant);
    this.element = element("article", { class: "message", "aria-busy": "true" }, title, this.thinking, this.body, this.foot);
    this.pieces = []; // {text, thought, tokens}: all that has arrived
    this.shown = 0; // pieces on the page
    this.line = ""; // of figures
    this.show = paced(() => around(() => this.showNow()));
    this.clear();
    listen(this.body);
  }

  /** Show the text from its beginning: with its tokens, or as Markdown. */
  clear(hasTokens = this.mode === "prompt") {
    this.hasTokens = hasTokens;
    this.body.replaceChildren();
    this.body.classList.toggle("markdown", !hasTokens);
    this.text = hasTokens ? new TokenText(this.body) : new Markdown(this.body);
    this.shown = 0;
  }

  add(piece) {
    this.pieces.push(piece);
    this.show();
  }

  showStats(text) {
    this.line = text;
    this.show();
  }

  /** Show what has arrived since the last call, as one change. */
  showNow() {
    const pieces = this.pieces.slice(this.shown);
    this.shown = this.pieces.length;
    this.stats.textContent = this.line;
    if (this.hasTokens) {
      for (const { text, thought, tokens } of pieces) this.text.add(thought + text, tokens);
      this.text.flush();
      return;
    }
    const joined = (name) => pieces.map((each) => each[name]).join("");
    const thought = joined("thought");
    if (thought) this.thought.appendData(thought);
    this.thinking.hidden = this.thought.length === 0;
    const text = joined("text");
    if (text) this.text.add(text);
  }

  end(error = null) {
    this.showNow();
    this.element.removeAttribute("aria-busy");
    if (error) this.body.after(element("p", { class: "error", role: "alert" }, error));
    const buttons = this.actions.map(([text, act]) => button(text, act));
    if (this.pieces.some((each) => each.tokens.length)) buttons.push(this.toggle());
    this.foot.append(...buttons);
  }

  /** A button that shows the tokens, and lets the keyboard choose them. */
  toggle() {
    const made = button("Tokens", () => {
      const isOn = made.getAttribute("aria-pressed") !== "true";
      made.setAttribute("aria-pressed", String(isOn));
      if (this.mode === "chat") {
        if (this.body.nextElementSibling.classList.contains("choices")) this.body.nextElementSibling.remove();
        this.thought.data = "";
        this.thinking.hidden = true;
        this.clear(isOn);
        this.showNow();
      }
      setButtons(this.body, isOn);
    }, { "aria-pressed": "false", title: "Show each token with its alternatives; the arrow keys move" });
    return made;
  }
}
