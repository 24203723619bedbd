// The tokens of an answer: text to click, and the alternatives of one token.

import { element } from "./dom.js";

const UNSURE = Math.log(0.2); // a token less probable than this is underlined

/** The tokens of one chunk of a stream, for both kinds of calls: {text, logprob, top: [{text, logprob}]}. */
export function tokensOf(choice) {
  const { logprobs } = choice;
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token,
      logprob: each.logprob,
      top: each.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

/**
 * Adds the text of a stream to a body, with a span for each token and a block for each line: a browser then lays out
 * the last line alone. `flush` shows what was added.
 *
 * A piece of text and its tokens need not agree: special tokens have no text, and several tokens may spell one character.
 * Tokens that are not spelled by the text so far wait, and share the next span.
 */
export class TokenText {
  constructor(body) {
    this.body = body;
    this.waiting = [];
    this.line = null; // the last block; null if the next text begins one
    this.made = []; // for the end of the last block
  }

  flush() {
    this.line?.append(...this.made);
    this.made = [];
  }

  add(text, tokens) {
    let rest = text;
    for (const token of tokens) {
      const at = token.text ? rest.indexOf(token.text) : -1;
      // Text before a token belongs to the tokens that wait; without such tokens it must begin here.
      if (at < 0 || (at > 0 && !this.waiting.length)) {
        this.waiting.push(token);
        continue;
      }
      this.append(rest.slice(0, at), this.take());
      this.append(token.text, [token]);
      rest = rest.slice(at + token.text.length);
    }
    if (rest) this.append(rest, this.take());
  }

  take() {
    return this.waiting.splice(0);
  }

  append(text, tokens) {
    if (!text) return;
    if (!this.line) {
      this.line = element("div");
      this.body.append(this.line);
    }
    this.made.push(tokens.length ? this.span(text, tokens) : text);
    if (!text.endsWith("\n")) return;
    this.flush();
    this.line = null;
  }

  span(text, tokens) {
    const isUnsure = tokens.some((each) => each.logprob !== null && each.logprob < UNSURE);
    const span = element("span", { class: isUnsure ? "token unsure" : "token" }, text);
    span.tokens = tokens;
    return span;
  }
}

/** Show the alternatives of a chosen token below the body. A second choice of the same token closes them. */
function choose(body, span) {
  const open = body.nextElementSibling?.classList.contains("choices") ? body.nextElementSibling : null;
  open?.remove();
  const before = body.querySelector(".chosen");
  if (before) mark(before, false);
  if (before === span) return;
  mark(span, true);
  const choices = element("div", { class: "choices", role: "status" }, ...span.tokens.map(table));
  body.after(choices);
  choices.scrollIntoView({ block: "nearest" });
}

function mark(span, isChosen) {
  span.classList.toggle("chosen", isChosen);
  if (span.hasAttribute("role")) span.setAttribute("aria-expanded", String(isChosen)); // plain text cannot expand
}

/** Turn the tokens into buttons for the keyboard, or back into text. Arrow keys move between them. */
export function setButtons(body, isOn) {
  body.classList.toggle("tokens", isOn);
  const spans = [...body.querySelectorAll(".token")];
  spans.forEach((span, i) => {
    if (isOn) {
      span.setAttribute("role", "button");
      span.setAttribute("aria-expanded", String(span.classList.contains("chosen")));
      if (!span.textContent.trim()) span.setAttribute("aria-label", visible(span.textContent));
      span.tabIndex = i ? -1 : 0;
    } else {
      for (const name of ["role", "aria-expanded", "aria-label", "tabindex"]) span.removeAttribute(name);
    }
  });
  if (isOn) spans[0]?.focus();
}

/** React to clicks and keys of all tokens in a body. */
export function listen(body) {
  body.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span && getSelection().isCollapsed) choose(body, span);
  });
  body.addEventListener("keydown", (event) => {
    const span = event.target.closest(".token");
    if (!span) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(body, span);
    else if (step) {
      const spans = [...body.querySelectorAll(".token")];
      const next = spans[spans.indexOf(span) + step];
      if (!next) return;
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  });
}

function table(token) {
  const rows = token.top.some((each) => each.text === token.text) ? token.top : [token, ...token.top];
  const sorted = [...rows].sort((one, other) => other.logprob - one.logprob);
  return element("table", { "aria-label": `Alternatives of ${visible(token.text)}` }, ...sorted.map((each) => row(each, token)));
}

function row(each, token) {
  const share = Math.exp(each.logprob);
  const percent = `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
  const isDrawn = each.text === token.text;
  return element(
    "tr",
    { class: isDrawn ? "drawn" : null },
    element("td", {}, visible(each.text) + (isDrawn ? " (drawn)" : "")),
    element("td", {}, percent),
    element("td", {}, element("meter", { min: 0, max: 1, value: share, "aria-label": percent })),
  );
}

const visible = (text) =>
  text.startsWith("bytes:") ? text : JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "\u2423");
