// AI SDK 6 and 7: openai() over responses and chats, anthropic(), and the compatible provider. Three turns with a tool,
// whole and streamed; objects; objects beside a tool.
// Run by `python -m lab judges`, with the packages of packages/ai6 or packages/ai7 in node_modules.

import { connect } from "./node_client.mjs";

const { load, flags, expect, finish } = await connect();
const { generateText, streamText, stepCountIs, isStepCount, tool, Output } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const twoSteps = (stepCountIs ?? isStepCount)(2);
// A grammar allows any number of blanks, and the toy model calls until its limit.
function bounded(text) {
  const body = { ...JSON.parse(text), logit_bias: Object.fromEntries([9, 10, 13, 32].map((blank) => [blank, -100])) };
  if (body.messages && body.tool_choice?.type) body.tool_choice.disable_parallel_tool_use = true;
  else if (body.tools) body.parallel_tool_calls = false;
  return JSON.stringify(body);
}

const options = {
  baseURL: `${flags.url}/v1`,
  apiKey: flags["api-key"],
  fetch: (url, call) => fetch(url, { ...call, body: bounded(call.body) }),
};
const openai = createOpenAI(options);
const models = {
  responses: openai(flags.model),
  chat: openai.chat(flags.model),
  anthropic: createAnthropic(options)(flags.model),
  compatible: createOpenAICompatible({ name: "orca", includeUsage: true, supportsStructuredOutputs: true, ...options })(
    flags.model,
  ),
};
const asked = ["How are you?", "And there?", "And tomorrow?"];
const City = z.object({ name: z.enum(["Bern", "Oslo"]), size: z.number().int().min(0).max(9) });
const common = { maxOutputTokens: 200, maxRetries: 0 };
const tools = {
  get_weather: tool({
    description: "Ask for it.",
    inputSchema: z.object({ unit: z.enum(["celsius", "kelvin"]) }),
    execute: async ({ unit }) => `fair, in ${unit}`,
  }),
};

async function whole(fields) {
  return generateText({ ...common, ...fields });
}

async function streamed(fields) {
  const failures = [];
  const result = streamText({ ...common, ...fields, onError: ({ error }) => failures.push(error) });
  for await (const _ of result.fullStream);
  if (failures.length > 0) throw failures[0];
  const [steps, response, usage] = await Promise.all([result.steps, result.response, result.usage]);
  return { steps, response, usage, output: fields.output && (await result.output) };
}

// Each turn: a forced call, its result, and an answer; the SDK's own messages are sent back.
async function threeTurns(model, ask, more = {}) {
  const messages = [];
  for (const question of asked) {
    messages.push({ role: "user", content: question });
    const answer = await ask({
      ...{ model, tools, messages, stopWhen: twoSteps, ...more },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    expect(answer.steps.length === 2, answer.steps.map((step) => step.content));
    const calls = answer.steps[0].toolCalls;
    expect(calls.length > 0 && calls.every((call) => call.toolName === "get_weather" && !call.invalid), calls);
    expect(answer.steps[0].toolResults.length === calls.length, answer.steps[0].toolResults);
    expect(answer.usage.inputTokens > 0, answer.usage);
    if (more.output) City.parse(answer.output);
    const all = answer.steps.flatMap((step) => step.response.messages);
    messages.push(...(answer.response.messages.length >= 3 ? answer.response.messages : all));
  }
}

const checks = {};
for (const [name, model] of Object.entries(models)) {
  for (const ask of [whole, streamed]) {
    checks[`${name}_three_turns_${ask.name}`] = () => threeTurns(model, ask);
    checks[`${name}_object_${ask.name}`] = async () => {
      const { output } = await ask({ model, prompt: asked[0], output: Output.object({ schema: City }) });
      City.parse(output);
    };
    checks[`${name}_tools_and_object_${ask.name}`] = () =>
      threeTurns(model, ask, { output: Output.object({ schema: City }) });
  }
}
await finish(checks, ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible"]);
