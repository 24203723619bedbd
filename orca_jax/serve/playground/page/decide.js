// Decisions: typed questions about a state, the probabilities of their answers, and the iterations that answered them.

import { post } from "./api.js";
import { announce, element, find } from "./dom.js";
import { endsText, questionsOf } from "./questions.js";

export class Decide {
  /** engine: has `numArrived` requests, and `endsOf(tokens, since)`, the iterations in which a call ended. */
  constructor(engine) {
    this.engine = engine;
    find("decide").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
  }

  async ask() {
    const questions = questionsOf(find("questions").value);
    const since = this.engine.numArrived;
    find("ask").disabled = true;
    try {
      const response = await post("v1/decisions", { input: find("decide-state").value, questions });
      const { answers, usage } = await response.json();
      find("answers").replaceChildren(...questions.map((each) => answerOf(each, answers[each.id])));
      const ends = await this.engine.endsOf(usage.prompt_tokens, since);
      this.say(`${usage.prompt_tokens} tokens: the state once, and each question. ${endsText(ends)}`);
    } catch (error) {
      find("answers").replaceChildren();
      this.say(error.message, true);
    }
    find("ask").disabled = false;
  }

  say(text, isBad = false) {
    find("decided").textContent = text;
    find("decided").classList.toggle("error", isBad);
    announce(text);
  }
}

function answerOf({ question, levels }, { type, probabilities, label_mass: mass }) {
  const rows = Object.entries(probabilities).map(([name, each]) => {
    const shown = type === "score" ? levels[name] : name;
    const bar = element("meter", { min: 0, max: 1, value: each, "aria-label": `${shown}: ${each.toFixed(3)}` });
    return element("tr", {}, element("td", {}, shown), element("td", {}, each.toFixed(3)), element("td", {}, bar));
  });
  const foot = element("p", { class: "muted small" }, `label mass ${mass.toFixed(3)}`);
  return element("div", { class: "choices" }, element("h3", {}, question), element("table", {}, ...rows), foot);
}
