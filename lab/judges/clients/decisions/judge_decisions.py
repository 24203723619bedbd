"""Decisions: the clients of OpenAI and of TypeSafe, and each requirement of jevcompat."""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
import typesafe_sdk
from typesafe_sdk._schemas import models as typesafe_models

from lab.judges.clients import checks
from lab.judges.clients.checks import Settings, catch, expect
from tests.decisions.sdk_fields import names_of

QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "broken", "instructions": "Broken?"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Team?"}],
        "choices": [{"value": "true", "description": "a text"}, {"value": True}],
    },
    {"type": "score", "instructions": "How bad?", "levels": [{"label": "low"}, {"label": "high"}]},
]


class Subject:
    """The clients with the address and the key."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.openai = openai.OpenAI(
            base_url=f"{settings.url}/v1", api_key=settings.api_key, max_retries=0
        )

    def decide(self, **fields: Any) -> Any:
        """Ask for decisions by the client of OpenAI."""
        given = {"model": self.settings.model, "input": "It came broken.", "questions": QUESTIONS}
        return self.openai.decisions.create(**{**given, **fields})


def openai_answers(s: Subject) -> None:
    predicate, choice, score = s.decide().answers
    expect(predicate.name == "broken" and 0 <= predicate.probability <= 1, f"{predicate}")
    expect([one.value for one in choice.probabilities] == ["true", True], f"{choice}")
    expect(abs(sum(one.probability for one in score.probabilities) - 1) < 1e-9, f"{score}")


def openai_fields(s: Subject) -> None:
    messages = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"parcel": "broken"}}]},
    ]
    answer = s.decide(
        input=messages,
        prompt_cache_key="k",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        safety_identifier="u",
    )
    expect(answer.usage.input_tokens > 0, f"{answer.usage}")


def openai_errors(s: Subject) -> None:
    for param, fields in (
        ("questions", {"questions": []}),
        ("questions[0].choices", {"questions": [{**QUESTIONS[1], "choices": []}]}),
        ("input[0].role", {"input": [{"role": "judge", "content": "x"}]}),
    ):
        error = catch(openai.BadRequestError, s.decide, **fields)
        expect(error.param == param, f"{param}: {error.param!r}")


def same_bits_again(s: Subject) -> None:
    whole = s.decide().answers
    for place, question in enumerate(QUESTIONS):
        (alone,) = s.decide(questions=[question]).answers
        expect(alone == whole[place], f"{alone} differs from {whole[place]}")


def typesafe_answers(s: Subject) -> None:
    questions = {
        "broken": typesafe_sdk.Noul(instructions="Broken?"),
        "team": typesafe_sdk.Choice(instructions="Team?", criteria={"x": None, "y": "the other"}),
    }
    with typesafe_sdk.TypeSafeClient(api_key=s.settings.api_key, base_url=s.settings.url) as client:
        answer = client.system_one(state={"text": "It came broken."}, questions=questions)
    expect(0 <= answer.nouls["broken"].noul <= 1, f"{answer}")
    expect(answer.choices["team"].choice in ("x", "y"), f"{answer}")


def fields_of_both_clients_are_in_the_tables(s: Subject) -> None:
    found = set()
    modules = [name for name in sys.modules if re.match(r"openai\.types\..*decision_", name)]
    for module in [sys.modules[name] for name in modules]:
        for each in vars(module).values():
            if inspect.isclass(each) and each.__module__ == module.__name__:
                found |= {*getattr(each, "__annotations__", {})}
    asked = {name for name in found if not name.startswith("_")}
    expect(asked == names_of("openai"), f"{sorted(asked ^ names_of('openai'))}")
    models: list[Any] = [each for each in vars(typesafe_models).values() if inspect.isclass(each)]
    bodies = [
        each for each in models if re.search("Question$|Request|Criteria|^Asset", each.__name__)
    ]
    named: set[str] = set().union(*[each.model_fields for each in bodies]) - {"root"}
    expect(named == names_of("typesafe"), f"{sorted(named ^ names_of('typesafe'))}")


def jevcompat(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = ["test", s.settings.url, "--key", s.settings.api_key, "--json", str(report)]
        program = Path(sys.executable).with_name("jevcompat")
        subprocess.run([str(program), *words], check=False, capture_output=True)
        results = json.loads(report.read_text(encoding="utf-8"))["results"]
    failed = [f"{one['level']} {one['id']}" for one in results if one["status"] == "fail"]
    expect(len(results) > 40 and not failed, f"of {len(results)}: {', '.join(failed)}")


CHECKS = [
    openai_answers, openai_fields, openai_errors, same_bits_again, typesafe_answers,
    fields_of_both_clients_are_in_the_tables, jevcompat,
]  # fmt: skip


def main() -> int:
    """Run the checks."""
    settings = checks.settings(__doc__)
    packages = ["openai", "typesafe-sdk", "jevcompat"]
    return checks.run(CHECKS, Subject(settings), packages, settings.report)


if __name__ == "__main__":
    sys.exit(main())
