// Calls of the server: the API key, errors, and server-sent events.

import { find } from "./dom.js";

let key = sessionStorage.getItem("orca-key") ?? "";
let asking = null; // the promise of a new key, shared by all calls that wait for it

export class Failure extends Error {}

/** The reader has closed the dialog without a key. */
export class NoKey extends Failure {}

/** Call the server; after a 401 ask for a key and call again. Throws a Failure with the server's message. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("the server does not answer");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (used === key) await newKey();
      continue;
    }
    throw new Failure(await messageOf(response));
  }
}

export const post = (path, body, signal) =>
  call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });

/** Yield {event, data} for each event of a stream; comments are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = { event: "message", data: "" };
      const lines = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ")) lines.push(line.slice(6));
        else if (line.startsWith("event: ")) found.event = line.slice(7);
      }
      found.data = lines.join("\n");
      if (lines.length) yield found;
    }
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

function newKey() {
  asking ??= new Promise((resolve, reject) => {
    const dialog = find("key-dialog");
    const text = key ? "This key is not one of the server's." : "This server needs an API key. It stays in this tab.";
    find("key-text").textContent = text;
    find("key").value = "";
    find("key-cancel").onclick = () => dialog.close("cancel");
    find("key-form").onsubmit = () => {
      key = find("key").value.trim();
      sessionStorage.setItem("orca-key", key);
    };
    dialog.onclose = () => {
      const entered = dialog.returnValue !== "cancel" && key;
      dialog.returnValue = "cancel";
      asking = null;
      if (entered) resolve();
      else reject(new NoKey("no API key was given"));
    };
    dialog.returnValue = "cancel";
    dialog.showModal();
  });
  return asking;
}

export const hasKey = () => key !== "";
