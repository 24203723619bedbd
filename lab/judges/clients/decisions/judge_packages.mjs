// Decisions: the npm packages of OpenAI and of TypeSafe, and the AI SDK's provider.
// Run by `python -m lab judges`, with the packages of packages/decisions in node_modules.

import { connect } from "../node_client.mjs";

const { load, flags, expect, finish } = await connect();
const { default: OpenAI } = await load("openai");
const { TypeSafeClient, choice, noul } = await load("@typesafe-ai/sdk");
const { createTypeSafeAi } = await load("@ai-sdk/typesafe-ai");
const { experimental_evaluate: evaluate } = await load("ai");

const { model, url, "api-key": apiKey } = flags;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const input = "It came broken.";
const isShare = (value) => value >= 0 && value <= 1;

const checks = {
  async openai() {
    const questions = [
      { type: "predicate", name: "broken", instructions: "Broken?" },
      { type: "choice", instructions: "Team?", choices: [{ value: "true", description: "a text" }, { value: true }] },
      { type: "score", instructions: "How bad?", levels: [{ label: "low" }, { label: "high" }] },
    ];
    const { answers } = await client.decisions.create({ model, input, questions });
    expect(answers[0].name === "broken" && isShare(answers[0].probability), answers);
    expect(answers[1].probabilities.map(({ value }) => value).join() === "true,true", answers);
    expect(Math.abs(answers[2].probabilities.reduce((sum, each) => sum + each.probability, 0) - 1) < 1e-9, answers);
  },
  async openai_errors() {
    try {
      await client.decisions.create({ model, input, questions: [] });
    } catch (error) {
      expect(error instanceof OpenAI.BadRequestError && error.param === "questions", error);
      return;
    }
    throw new Error("no error");
  },
  async typesafe() {
    const typesafe = new TypeSafeClient({ apiKey, baseURL: url });
    const questions = { broken: noul("Broken?"), team: choice("Team?", { x: null, y: "the other" }) };
    const { answers } = await typesafe.systemOne({ state: { text: input }, questions });
    expect(isShare(answers.broken.noul) && ["x", "y"].includes(answers.team.choice), answers);
  },
  async ai_sdk() {
    const provider = createTypeSafeAi({ apiKey, baseURL: `${url}/v1` });
    const { answers } = await evaluate({
      model: provider.evaluationModel("jev-latest"),
      state: input,
      questions: {
        team: { type: "choice", instructions: "Team?", criteria: { x: "one", y: "the other" } },
        broken: { type: "boolean", instructions: "Broken?" },
      },
    });
    expect(Object.keys(answers).join() === "team,broken", answers);
  },
};

await finish(checks, ["openai", "@typesafe-ai/sdk", "@ai-sdk/typesafe-ai", "ai"]);
