// openai-node: every method for the server's routes, its typed exceptions, retries, timeouts and disconnects.
// Run by `python -m lab judges`, with the packages of packages/node in node_modules.

import { connect } from "./node_client.mjs";

const { load, flags, expect, finish } = await connect();
const { default: OpenAI } = await load("openai");
const { zodResponseFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const model = flags.model;
const client = new OpenAI({ baseURL: `${flags.url}/v1`, apiKey: flags["api-key"], timeout: 60_000 });
const messages = [{ role: "user", content: "How are you?" }];
const parameters = {
  type: "object",
  properties: { unit: { enum: ["celsius", "kelvin"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["unit", "days"],
  additionalProperties: false,
};
const tools = [
  { type: "function", function: { name: "get_weather", parameters } },
  { type: "function", function: { name: "get_time", parameters } },
];

async function fails(kind, call) {
  try {
    await call();
  } catch (error) {
    expect(error instanceof kind, `${error.constructor.name} instead of ${kind.name}: ${error.message}`);
    return error;
  }
  throw new Error(`no ${kind.name}`);
}

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function idle() {
  const deadline = Date.now() + 10_000;
  for (;;) {
    const load = await (await fetch(`${flags.url}/health`)).json();
    if (load.running === 0 && load.waiting === 0) return;
    expect(Date.now() < deadline, load);
    await new Promise((wake) => setTimeout(wake, 50));
  }
}

const complete = (fields) => client.completions.create({ model, prompt: "Hello", ...fields });
const chat = (fields) => client.chat.completions.create({ model, messages, ...fields });

function checkWeather(text) {
  const { unit, days, ...rest } = JSON.parse(text);
  expect(["celsius", "kelvin"].includes(unit) && days >= 1 && days <= 9 && Object.keys(rest).length === 0, text);
}

const checks = {
  async models() {
    const names = [];
    for await (const card of client.models.list()) names.push(card.id);
    expect(names.includes(model), names);
    expect((await client.models.retrieve(model)).id === model, "one model");
  },
  async completion() {
    const answer = await complete({ max_tokens: 8 });
    expect(answer.usage.completion_tokens <= 8, answer);
    expect(answer._request_id, "no request id");
  },
  async completion_batch_and_n() {
    const answer = await complete({ prompt: ["a", "b"], n: 2, max_tokens: 3 });
    expect(answer.choices.map((choice) => choice.index).join() === "0,1,2,3", answer);
  },
  async completion_logprobs_and_echo() {
    const { choices, usage } = await complete({ logprobs: 1, echo: true, max_tokens: 2 });
    expect(choices[0].logprobs.tokens.length === usage.total_tokens, choices);
    expect(choices[0].text.startsWith("Hello"), choices);
  },
  async completion_stream() {
    const chunks = await collect(await complete({ stream: true, temperature: 0, max_tokens: 20 }));
    const whole = await complete({ temperature: 0, max_tokens: 20 });
    expect(chunks.map((chunk) => chunk.choices[0].text).join("") === whole.choices[0].text, "a stream is the same text");
  },
  async completion_stream_usage() {
    const chunks = await collect(await complete({ stream: true, stream_options: { include_usage: true }, max_tokens: 4 }));
    expect(chunks.at(-1).choices.length === 0 && chunks.at(-1).usage.prompt_tokens > 0, chunks.at(-1));
    expect(chunks.slice(0, -1).every((chunk) => chunk.usage === null), "usage comes once");
  },
  async chat() {
    const answer = await chat({ max_completion_tokens: 8, n: 2 });
    expect(answer.choices.length === 2 && answer.choices[0].message.role === "assistant", answer);
  },
  async chat_logprobs() {
    const answer = await chat({ logprobs: true, top_logprobs: 2, max_tokens: 3 });
    expect(answer.choices[0].logprobs.content.every((token) => token.top_logprobs.length === 2), answer);
  },
  async chat_stream() {
    const chunks = await collect(await chat({ stream: true, temperature: 0, max_tokens: 20 }));
    const whole = await chat({ temperature: 0, max_tokens: 20 });
    const text = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
    expect(text === whole.choices[0].message.content, "a stream is the same text");
  },
  async chat_stream_helper() {
    const structured_outputs = { choice: ["yes", "no"] };
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 8, structured_outputs });
    const final = await stream.finalChatCompletion();
    expect(["yes", "no"].includes(final.choices[0].message.content), final);
  },
  async tools_required_and_named() {
    for (const tool_choice of ["required", { type: "function", function: { name: "get_time" } }]) {
      const { message } = (await chat({ tools, tool_choice, parallel_tool_calls: false, max_tokens: 200 })).choices[0];
      for (const call of message.tool_calls) checkWeather(call.function.arguments);
    }
  },
  async tools_stream() {
    const one = { tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
    const stream = client.chat.completions.stream({ model, messages, tools, ...one });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    for (const call of message.tool_calls) checkWeather(call.function.arguments);
  },
  async parsed() {
    const City = z.object({ name: z.enum(["Bern", "Oslo"]), is_capital: z.boolean() });
    const response_format = zodResponseFormat(City, "city");
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 100 });
    City.parse(answer.choices[0].message.parsed);
  },
  async bad_request() {
    const error = await fails(OpenAI.BadRequestError, () => complete({ temperature: 3 }));
    expect(error.param === "temperature" && error.type === "invalid_request_error", error.message);
    const bad = await fails(OpenAI.BadRequestError, () => chat({ messages: [] }));
    expect(bad.param === "messages", bad.message);
  },
  async unauthorized() {
    const stranger = client.withOptions({ apiKey: "not-the-key" });
    await fails(OpenAI.AuthenticationError, () => stranger.models.retrieve(model));
    await fails(OpenAI.AuthenticationError, () => stranger.completions.create({ model, prompt: "x" }));
  },
  async not_found() {
    const error = await fails(OpenAI.NotFoundError, () => complete({ model: "missing" }));
    expect(error.code === "model_not_found", error.code);
    await fails(OpenAI.NotFoundError, () => client.models.retrieve("missing"));
    await fails(OpenAI.NotFoundError, () => client.moderations.create({ model, input: "x" }));
  },
  async mistakes_are_not_retried() {
    let sent = 0;
    const counting = client.withOptions({ maxRetries: 3, fetch: (...request) => (sent++, fetch(...request)) });
    await fails(OpenAI.BadRequestError, () => counting.completions.create({ model, prompt: "x", top_p: 7 }));
    expect(sent === 1, `sent ${sent} times`);
  },
  async timeout() {
    const options = { timeout: 200, maxRetries: 0 };
    const body = { model, prompt: "x", max_tokens: 4000, ignore_eos: true };
    await fails(OpenAI.APIConnectionTimeoutError, () => client.completions.create(body, options));
    await idle();
  },
  async hang_up() {
    for (const create of [complete, chat]) {
      const stream = await create({ stream: true, max_tokens: 4000, ignore_eos: true });
      for await (const chunk of stream) {
        expect(chunk.id, chunk);
        break;
      }
      stream.controller.abort();
    }
    await idle();
  },
  async concurrent() {
    const streams = Array.from({ length: 16 }, async (_, i) =>
      collect(await complete({ prompt: `Hello ${i}`, stream: true, max_tokens: 8 })),
    );
    expect((await Promise.all(streams)).every((chunks) => chunks.length > 0), "sixteen streams at once");
  },
};

await finish(checks, ["openai"]);
