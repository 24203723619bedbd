"""`POST /v1/systemone`: the form of TypeSafe, whose clients many models have."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob, new_id
from orca_jax.serve.openai.decisions.wires import about
from orca_jax.serve.openai.errors import ApiError, sane
from orca_jax.serve.openai.schema.decisions.answers import (
    SystemAnswer,
    SystemAnswers,
    SystemFault,
    SystemOneError,
    SystemRefusal,
    SystemUsage,
)
from orca_jax.serve.openai.schema.decisions.bodies import SystemQuestion, SystemRequest
from orca_jax.text.decisions.questions import Question, as_text
from orca_jax.text.decisions.reads import TypedAnswer
from orca_jax.values.errors import RequestError

ENDPOINT = "/v1/systemone"
LATEST = "jev-latest"
"""The model that clients ask for by default: the one that is served."""
_SIDES = ("true", "false")
_KINDS: Mapping[int, str] = {401: "authentication_error", 403: "permission_error"}


def understood(call: SystemRequest, name: str) -> AskedDecisions:
    """What a call asks for. Raises ApiError; its `param` is the path of what is wrong."""
    questions = [_question(one, f"questions.{key}") for key, one in call.questions.items()]
    before = []
    if call.instructions:
        before.append({"role": "system", "content": as_text(call.instructions)})
    return AskedDecisions(
        id=new_id(call, name, "systemone"),
        endpoint=ENDPOINT,
        fields=call,
        state_param="state",
        state=as_text(call.state),
        before=before,
        questions=questions,
        order=call.order or "given",
        variables=call.chat_template_kwargs or {},
    )


def answer(call: SystemRequest, job: DecisionJob, decided: Decided, model: str) -> bytes:
    """The JSON of an answer."""
    pairs = zip(call.questions.items(), decided.answers, strict=True)
    answers = {key: _answer(question, one) for (key, question), one in pairs}
    return msgspec.json.encode(SystemAnswers(model, answers, SystemUsage(decided.num_tokens)))


def encode_error(error: ApiError) -> tuple[int, bytes]:
    """The status and the JSON of an error. A wrong body has the status 422 and a list."""
    if error.status == 400:
        path = [part for part in (error.param or "").replace("]", "").replace("[", ".").split(".")]
        place = ["body", *[int(part) if part.isdecimal() else part for part in path if part]]
        fault = SystemFault(place, sane(error.message), error.code or "value_error")
        return 422, msgspec.json.encode(SystemOneError([fault]))
    kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request")
    refusal = SystemRefusal(kind, sane(error.message))
    return error.status, msgspec.json.encode(SystemOneError(refusal))


def is_systemone(scope: Mapping[str, Any]) -> bool:
    """True for calls of this route. `scope` is ASGI's."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == ENDPOINT


def _question(question: SystemQuestion, path: str) -> Question:
    """A question as the model reads it. Raises ApiError."""
    text = "" if question.instructions is None else as_text(question.instructions)
    criteria = question.criteria
    path = f"{path}.criteria"
    try:
        if question.type == "noul":
            return Question.yes_no(text, *_sides(criteria, path))
        if question.type == "choice":
            return Question.choice(text, _described(criteria, path))
        return Question.score(text, _levels(criteria, path))
    except RequestError as error:
        raise ApiError(400, f"{path}: {error.message}", path) from None


def _sides(criteria: object, path: str) -> list[str | None]:
    """The descriptions of true and false."""
    if criteria is None:
        return [None, None]
    if not isinstance(criteria, dict) or not criteria.keys() <= {*_SIDES}:
        raise ApiError(400, f"{path} must be null, or an object with true, false or both", path)
    return [_description(criteria.get(side)) for side in _SIDES]


def _described(criteria: object, path: str) -> dict[str, str | None]:
    if not isinstance(criteria, dict) or not criteria:
        message = f"{path} must be an object of options with descriptions or null"
        raise ApiError(400, message, path)
    return {name: _description(each) for name, each in criteria.items()}


def _levels(criteria: object, path: str) -> Sequence[str]:
    if not isinstance(criteria, list) or not criteria or None in criteria:
        raise ApiError(400, f"{path} must be a list of levels, the lowest first", path)
    return [as_text(level) for level in criteria]


def _description(value: object) -> str | None:
    return None if value is None else as_text(value)


def _answer(question: SystemQuestion, one: TypedAnswer) -> SystemAnswer:
    more = about(one)
    if question.type == "noul":
        return SystemAnswer(type="noul", noul=one.yes, **more)
    if question.type == "choice":
        names = [option.name for option in one.question.options]
        return SystemAnswer(
            type="choice",
            choice=one.answer,
            confidence=one.margin,
            probabilities=dict(zip(names, one.probabilities, strict=True)),
            **more,
        )
    return SystemAnswer(
        type="score",
        score=one.score,
        confidence=one.margin,
        legend={str(index): option.name for index, option in enumerate(one.question.options)},
        probabilities={str(index): each for index, each in enumerate(one.probabilities)},
        **more,
    )
