// The conversations, one for each kind of request: calls the server, shows answers as they arrive, and keeps the messages.

import { call, events, hasKey, post } from "./api.js";
import { announce, button, copy, download, element, find, isSend, segments } from "./dom.js";
import { Answer, userMessage } from "./message.js";
import { callOf, chosenParameters, curlOf } from "./parameters.js";
import { tokensOf } from "./tokens.js";

const LABELS = { chat: ["Message", "Write a message; Enter sends it, Shift and Enter make a new line"],
  prompt: ["Prompt", "Write the beginning of a text; Enter continues it"] };
const KEPT = "orca-chat"; // in the storage of this tab: {mode, talks}

export class Chat {
  /** engine: has `numArrived` requests, and `rateOf(usage, since)`, the engine's tokens per second of a call. */
  constructor(settings, engine) {
    this.settings = settings;
    this.engine = engine;
    this.talks = { chat: [], prompt: [] }; // lists of {role, content, reasoning, stats, element, call?}
    this.mode = "chat";
    this.cleared = []; // messages that can come back
    this.abort = null; // of the running call
    this.list = find("messages");
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
    for (const mode of Object.keys(this.talks)) this.restore(mode, kept?.talks[mode] ?? []);
    const setMode = segments(find("modes"), "mode", (mode) => this.setMode(mode));
    setMode(settings.has_chat ? (kept?.mode ?? "chat") : "prompt");
    find("modes").hidden = !settings.has_chat;
    this.listen();
  }

  listen() {
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.send(find("input").value);
    });
    find("input").addEventListener("keydown", (event) => {
      if (!isSend(event)) return;
      event.preventDefault();
      if (!this.abort) this.send(find("input").value);
    });
    find("clear").addEventListener("click", () => (this.cleared.length ? this.bringBack() : this.clear()));
    find("export").addEventListener("click", () => {
      download("conversation.json", new Blob([this.exported()], { type: "application/json" }));
    });
    addEventListener("pagehide", () => this.keep());
  }

  get messages() {
    return this.talks[this.mode];
  }

  setMode(mode) {
    document.body.dataset.mode = mode;
    if (mode === "decide") return; // the conversations stay behind it
    this.mode = mode;
    this.forgetCleared();
    const [label, hint] = LABELS[mode];
    find("input-label").textContent = label;
    find("input").placeholder = hint;
    this.list.replaceChildren(...this.messages.map((each) => each.element));
    this.list.scrollTop = this.list.scrollHeight;
    this.showExamples();
  }

  showExamples() {
    this.list.querySelector(".examples")?.remove();
    if (this.messages.length) return;
    const buttons = this.settings.examples[this.mode].map((text) => button(text, () => this.abort || this.send(text), { class: "example" }));
    this.list.append(element("div", { class: "examples" }, element("p", { class: "muted" }, "For example:"), ...buttons));
  }

  /** Keep the conversations for a reload of this tab, without tokens and calls. */
  keep() {
    const bare = ({ role, content, reasoning, stats }) => ({ role, content, reasoning, stats });
    const talks = Object.fromEntries(Object.entries(this.talks).map(([mode, messages]) => [mode, messages.map(bare)]));
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ mode: this.mode, talks }));
    } catch {
      console.info("the conversations are too long for the storage of this tab");
    }
  }

  restore(mode, kept) {
    const messages = this.talks[mode];
    for (const message of kept) {
      messages.push(message);
      if (message.role === "user") this.makeUser(message, mode);
      else {
        const shown = this.makeAnswer(message, mode);
        shown.add({ text: message.content, thought: message.reasoning ?? "", tokens: [] });
        shown.line = statsText(message.stats);
        shown.end();
      }
    }
  }

  makeUser(message, mode) {
    message.element = userMessage(message, mode, (edited) => {
      this.truncate(this.messages.indexOf(message));
      this.send(edited);
    });
  }

  makeAnswer(message, mode) {
    const callOfMessage = () => message.call ?? callOf(mode, this.talks[mode].slice(0, this.talks[mode].indexOf(message)), this.settings);
    const actions = [
      ["Regenerate", () => this.regenerate(message)],
      ["Copy as curl", () => copy(curlOf(callOfMessage(), hasKey()), "command")],
      ["Copy text", () => copy(message.content, "text")],
    ];
    const shown = new Answer(mode, actions, (show) => this.keepEnd(show));
    message.element = shown.element;
    return shown;
  }

  /** Change the page; if the end of the list is in view, it stays there. */
  keepEnd(show) {
    const { list } = this;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    show();
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  send(text) {
    if (!text.trim()) return;
    find("input").value = "";
    this.forgetCleared();
    const message = { role: "user", content: text };
    this.makeUser(message, this.mode);
    this.add(message);
    this.answer();
  }

  add(message) {
    this.messages.push(message);
    this.showExamples();
    this.list.append(message.element);
    this.list.scrollTop = this.list.scrollHeight;
    this.keep();
  }

  /** Remove and return all messages from this one on. */
  truncate(index) {
    this.abort?.abort();
    const removed = this.messages.splice(index);
    for (const message of removed) message.element.remove();
    return removed;
  }

  clear() {
    this.cleared = this.truncate(0);
    if (this.cleared.length) find("clear").textContent = "Undo clear";
    this.showExamples();
    this.keep();
  }

  bringBack() {
    const messages = this.cleared;
    this.forgetCleared();
    for (const message of messages) this.add(message);
  }

  forgetCleared() {
    this.cleared = [];
    find("clear").textContent = "Clear";
  }

  async answer() {
    const { mode } = this;
    const made = callOf(mode, this.messages, this.settings);
    const message = { role: "assistant", content: "", reasoning: "", call: made, stats: newStats() };
    const shown = this.makeAnswer(message, mode);
    this.add(message);
    const abort = new AbortController();
    this.setRunning(abort);
    let error = null;
    try {
      await this.stream(made, message, shown, abort.signal);
    } catch (caught) {
      if (caught.name !== "AbortError") error = caught.message;
      else message.stats.finish_reason = "stopped here";
    }
    shown.line = statsText(message.stats);
    this.keepEnd(() => shown.end(error));
    if (this.abort === abort) this.setRunning(null);
    announce(error ?? `Answer complete. ${statsText(message.stats)}`);
    this.keep();
  }

  async stream(made, message, shown, signal) {
    const begun = performance.now();
    const { stats } = message;
    const since = this.engine.numArrived;
    const response = await post(made.path, made.body, signal);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) this.showRate(chunk.usage, since, message, shown);
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      stats.finish_reason = choice.finish_reason ?? stats.finish_reason;
      const text = (choice.delta ? choice.delta.content : choice.text) ?? "";
      const thought = choice.delta?.reasoning ?? "";
      const tokens = tokensOf(choice);
      if (!text && !thought && !tokens.length) continue;
      stats.ttft_ms ??= performance.now() - begun;
      stats.tokens += tokens.length;
      message.reasoning += thought;
      message.content += text;
      shown.add({ text, thought, tokens });
      shown.showStats(statsText(stats));
    }
  }

  /** Show the number of tokens, and the engine's rate as soon as it has told it. */
  async showRate(usage, since, message, shown) {
    message.stats.tokens = usage.completion_tokens;
    message.stats.cache = usage.cache_explanation?.reason;
    message.stats.tokens_per_s = await this.engine.rateOf(usage, since);
    shown.showStats(statsText(message.stats));
    this.keep();
  }

  regenerate(message) {
    const index = this.messages.indexOf(message);
    if (index < 0) return;
    this.truncate(index);
    this.answer();
  }

  setRunning(abort) {
    this.abort = abort;
    find("send").textContent = abort ? "Stop" : "Send";
  }

  exported() {
    const messages = this.messages.map(({ role, content, reasoning, stats, call: made }) => ({ role, content, reasoning, stats, call: made }));
    return JSON.stringify({ mode: this.mode, parameters: chosenParameters(), settings: this.settings, messages }, null, 2);
  }
}

export async function loadSettings() {
  return (await call("playground/settings")).json();
}

const newStats = () => ({ tokens: 0, ttft_ms: null, tokens_per_s: null, finish_reason: null });

function statsText(stats) {
  if (!stats) return "";
  const parts = [`${stats.tokens} tokens`];
  if (stats.tokens_per_s) parts.push(`${stats.tokens_per_s.toFixed(1)} tokens/s`);
  if (stats.ttft_ms !== null) parts.push(`first token after ${stats.ttft_ms.toFixed(0)} ms`);
  if (stats.finish_reason && stats.finish_reason !== "stop") parts.push(stats.finish_reason);
  if (stats.cache) parts.push(stats.cache);
  return parts.join(", ");
}
