// The fields of a call that a reader can set, and the call as a curl command.

import { find } from "./dom.js";

const MAX_TOKENS = 256; // at the start; a small model that repeats itself would fill more
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The fields that are set; the server has defaults for all others. */
export function chosenParameters() {
  const form = find("fields");
  const chosen = {};
  for (const name of NUMBERS) {
    const { valueAsNumber } = form.elements[name];
    if (!Number.isNaN(valueAsNumber)) chosen[name] = valueAsNumber;
  }
  const stops = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stops.length) chosen.stop = stops;
  return chosen;
}

/** Show the server's defaults, and keep the summary of the form current. */
export function showParameters(settings) {
  const form = find("fields");
  find("scheduler").textContent = settings.scheduler;
  for (const name of ["temperature", "top_p"]) {
    form.elements[name].placeholder = settings.defaults[name] ?? 1;
  }
  form.elements.max_tokens.max = settings.context;
  form.elements.max_tokens.value = Math.min(MAX_TOKENS, Math.floor(settings.context / 2));
  const update = () => {
    const parts = Object.entries(chosenParameters()).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
    find("chosen").textContent = parts.join(", ");
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

/** The path and the body of a call that continues these messages. */
export function callOf(mode, messages, settings) {
  const top = Math.min(5, settings.max_logprobs);
  const common = { model: settings.model, ...chosenParameters(), stream: true, stream_options: { include_usage: true } };
  if (mode === "prompt") {
    const prompt = messages.at(-1).content;
    return { path: "v1/completions", body: { ...common, prompt, logprobs: top } };
  }
  const sent = messages.map(({ role, content }) => ({ role, content }));
  return { path: "v1/chat/completions", body: { ...common, messages: sent, logprobs: true, top_logprobs: top } };
}

export function curlOf({ path, body }, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const headers = ["content-type: application/json", ...(hasKey ? ["authorization: Bearer YOUR-KEY"] : [])];
  const parts = headers.map((each) => `-H ${quoted(each)}`);
  return `curl -N ${quoted(new URL(path, document.baseURI).href)} ${parts.join(" ")} -d ${quoted(JSON.stringify(body))}`;
}
