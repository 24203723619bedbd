"""Decisions: LiteLLM on both routes, and LangChain's `OpenAIDecisions`."""

import sys
from typing import Any

import litellm
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, catch, expect

INPUT = "It came broken."
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "broken", "instructions": "Broken?"},
    {
        "type": "choice",
        "name": "team",
        "instructions": "Team?",
        "choices": [{"value": "x"}, {"value": "y", "description": "the other"}],
    },
    {
        "type": "score",
        "name": "bad",
        "instructions": "How bad?",
        "levels": [{"label": "low"}, {"label": "high"}],
    },
]
SYSTEM: dict[str, Any] = {
    "broken": {"type": "noul", "instructions": "Broken?"},
    "team": {"type": "choice", "instructions": "Team?", "criteria": {"x": None, "y": "the other"}},
    "bad": {"type": "score", "instructions": "How bad?", "criteria": ["low", "high"]},
}


class Subject:
    """The libraries with the address and the key."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.common: dict[str, Any] = {
            "api_base": f"{settings.url}/v1",
            "api_key": settings.api_key,
            "timeout": 60,
        }

    def langchain(self) -> Any:
        """The class of LangChain with the address and the key."""
        return OpenAIDecisions(
            model=self.settings.model,
            api_key=self.settings.api_key,
            base_url=f"{self.settings.url}/v1",
            max_retries=0,
        )


def litellm_decisions(s: Subject) -> None:
    answer = litellm.decisions(
        f"openai/{s.settings.model}", input=INPUT, questions=QUESTIONS, **s.common
    )
    predicate, choice, score = answer.answers
    expect(0 <= predicate.probability <= 1, f"{predicate}")
    expect(choice.choice in ("x", "y"), f"{choice}")
    expect(abs(sum(each.probability for each in score.probabilities) - 1) < 1e-9, f"{score}")


def litellm_systemone(s: Subject) -> None:
    answer = litellm.systemone(
        f"hosted_vllm/{s.settings.model}", state={"text": INPUT}, questions=SYSTEM, **s.common
    )
    answers = answer.answers
    expect(0 <= answers["broken"].noul <= 1, f"{answers}")
    expect(answers["team"].choice in ("x", "y"), f"{answers}")
    expect(0 <= answers["bad"].score <= 1, f"{answers}")


def litellm_from_one_form_to_the_other(s: Subject) -> None:
    """The provider `hosted_vllm` asks by `/v1/systemone`, also for questions in OpenAI's form."""
    answer = litellm.decisions(
        f"hosted_vllm/{s.settings.model}", input=INPUT, questions=QUESTIONS, **s.common
    )
    expect(len(answer.answers) == len(QUESTIONS), f"{answer}")


def litellm_errors(s: Subject) -> None:
    error = catch(
        litellm.BadRequestError,
        litellm.decisions,
        model=f"openai/{s.settings.model}",
        input=INPUT,
        questions=[{**QUESTIONS[0], "instructions": "x" * 200_000}],
        **s.common,
    )
    expect(error.status_code == 400, f"{error}")


def langchain_answers(s: Subject) -> None:
    questions = {
        "broken": Predicate(instructions="Broken?"),
        "team": Choice(instructions="Team?", choices={"x": "one", "y": "the other"}),
        "bad": Score(instructions="How bad?", levels=["low", "high"]),
    }
    answer = s.langchain().invoke({"input": INPUT, "questions": questions})
    expect(0 <= answer.predicates["broken"].probability <= 1, f"{answer}")
    expect(answer.choices["team"].choice in ("x", "y"), f"{answer}")
    expect(0 <= answer.scores["bad"].score <= 1, f"{answer}")


CHECKS = [
    litellm_decisions, litellm_systemone, litellm_from_one_form_to_the_other, litellm_errors, langchain_answers,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    packages = ["litellm", "langchain-openai"]
    return checks.run(CHECKS, Subject(settings), packages, settings.report)


if __name__ == "__main__":
    sys.exit(main())
