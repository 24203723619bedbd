// The conversation: calls the server, shows answers as they arrive, and keeps the messages.

import { call, events, hasKey, post } from "./api.js";
import { announce, copy, download, find, segments } from "./dom.js";
import { Answer, userMessage } from "./message.js";
import { callOf, chosenParameters, curlOf } from "./parameters.js";
import { tokensOf } from "./tokens.js";

const TOGETHER_MS = 5; // events within this time came together, and their rate means nothing

const LABELS = { chat: ["Message", "Write a message; Enter sends it, Shift and Enter make a new line"],
  prompt: ["Prompt", "Write the beginning of a text; Enter continues it"] };

export class Chat {
  constructor(settings) {
    this.settings = settings;
    this.mode = "chat";
    this.messages = []; // {role, content, element, stats?, call?}
    this.abort = null; // of the running call
    this.list = find("messages");
    const setMode = segments(find("modes"), "mode", (mode) => this.setMode(mode));
    setMode(settings.has_chat ? "chat" : "prompt");
    find("modes").hidden = !settings.has_chat;
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.send(find("input").value);
    });
    find("input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.abort) this.send(find("input").value);
    });
    find("clear").addEventListener("click", () => this.truncate(0));
    find("export").addEventListener("click", () => download("conversation.json", this.exported()));
  }

  setMode(mode) {
    if (mode !== this.mode) this.truncate(0);
    this.mode = mode;
    const [label, hint] = LABELS[mode];
    find("input-label").textContent = label;
    find("input").placeholder = hint;
  }

  send(text) {
    if (!text.trim()) return;
    find("input").value = "";
    const message = { role: "user", content: text };
    message.element = userMessage(message, this.mode, (edited) => {
      this.truncate(this.messages.indexOf(message));
      this.send(edited);
    });
    this.add(message);
    this.answer();
  }

  add(message) {
    this.messages.push(message);
    this.list.append(message.element);
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** Remove all messages from this one on. */
  truncate(index) {
    this.abort?.abort();
    for (const message of this.messages.splice(index)) message.element.remove();
  }

  async answer() {
    const made = callOf(this.mode, this.messages, this.settings);
    const message = { role: "assistant", content: "", call: made };
    const shown = new Answer(this.mode, [
      ["Regenerate", () => this.regenerate(message)],
      ["Copy as curl", () => copy(curlOf(made, hasKey()), "command")],
      ["Copy text", () => copy(message.content, "text")],
    ]);
    message.element = shown.element;
    this.add(message);
    const abort = new AbortController();
    this.setRunning(abort);
    let error = null;
    try {
      await this.stream(made, message, shown, abort.signal);
    } catch (caught) {
      if (caught.name !== "AbortError") error = caught.message;
      else message.stats = { ...message.stats, finish_reason: "stopped here" };
    }
    shown.showStats(statsText(message.stats));
    shown.end(error);
    if (this.abort === abort) this.setRunning(null);
    announce(error ?? `Answer complete. ${statsText(message.stats)}`);
  }

  async stream(made, message, shown, signal) {
    const begun = performance.now();
    const stats = (message.stats = { tokens: 0, ttft_ms: null, tokens_per_s: null, finish_reason: null });
    let [first, early] = [begun, 0]; // the time of the first token, and the tokens that came with it
    const response = await post(made.path, made.body, signal);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) stats.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      stats.finish_reason = choice.finish_reason ?? stats.finish_reason;
      const text = (choice.delta ? choice.delta.content : choice.text) ?? "";
      const thought = choice.delta?.reasoning ?? "";
      const tokens = tokensOf(choice);
      if (!text && !thought && !tokens.length) continue;
      const now = performance.now();
      if (stats.ttft_ms === null) {
        first = now;
        stats.ttft_ms = now - begun;
      }
      stats.tokens += tokens.length;
      if (now - first < TOGETHER_MS) early = stats.tokens;
      else stats.tokens_per_s = (1000 * (stats.tokens - early)) / (now - first);
      const gap = text && message.reasoning && !message.content ? "\n\n" : "";
      message.reasoning = (message.reasoning ?? "") + thought;
      message.content += text;
      const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
      shown.add(thought + gap + text, tokens);
      shown.showStats(statsText(stats));
      if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
    }
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
    const messages = this.messages.map(({ role, content, stats, call: made }) => ({ role, content, stats, call: made }));
    return JSON.stringify({ mode: this.mode, parameters: chosenParameters(), settings: this.settings, messages }, null, 2);
  }
}

export async function loadSettings() {
  return (await call("playground/settings")).json();
}

function statsText(stats) {
  if (!stats) return "";
  const parts = [`${stats.tokens} tokens`];
  if (stats.tokens_per_s) parts.push(`${stats.tokens_per_s.toFixed(1)} tokens/s`);
  if (stats.ttft_ms !== null) parts.push(`first token after ${stats.ttft_ms.toFixed(0)} ms`);
  if (stats.finish_reason && stats.finish_reason !== "stop") parts.push(stats.finish_reason);
  return parts.join(", ");
}
