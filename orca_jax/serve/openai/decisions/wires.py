"""`POST /v1/decisions`: the forms of OpenAI and of SGLang, told apart by their questions."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.asked import TemplateMessage
from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob, new_id
from orca_jax.serve.openai.decisions.state import conversation_of, text_of
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema.answers import CompletionDetails
from orca_jax.serve.openai.schema.decisions.answers import (
    DecisionAnswer,
    DecisionList,
    DecisionUsage,
    InputTokenDetails,
    NamedAnswer,
    NamedDecisions,
    PlainUsage,
    ValueProbability,
)
from orca_jax.serve.openai.schema.decisions.bodies import (
    DecisionOption,
    DecisionQuestion,
    DecisionRequest,
)
from orca_jax.text.decisions.questions import AnswerOption, Question, as_text
from orca_jax.text.decisions.reads import TypedAnswer
from orca_jax.values.errors import RequestError

ENDPOINT = "/v1/decisions"
FORMAT_VERSION = 1
_OF_OPENAI = ("name", "instructions", "choices")
_OF_SGLANG = ("id", "question", "options", "yes", "no")
_LABELS = {True: "single", False: "several"}


def understood(service: Service, call: DecisionRequest, name: str) -> AskedDecisions:
    """What a call asks for. Raises ApiError; its `param` is the path of what is wrong."""
    is_named = _is_named(call.questions)
    questions = [
        (_named if is_named else _of_openai)(question, f"questions[{index}]")
        for index, question in enumerate(call.questions)
    ]
    keeps_late = service.model.keeps_late_system
    before: list[TemplateMessage] = []
    if is_named:
        _check_ids(call.questions)
        state = as_text(call.input)
    else:
        before, state = conversation_of(call.input, "input", keeps_late=keeps_late)
    return AskedDecisions(
        id=new_id(call, name, "decision"),
        endpoint=ENDPOINT,
        fields=call,
        state_param="input",
        state=state,
        before=before,
        questions=questions,
        order=call.order or "given",
        variables=call.chat_template_kwargs or {},
    )


def answer(call: DecisionRequest, job: DecisionJob, decided: Decided, model: str) -> bytes:
    """The JSON of an answer."""
    if _is_named(call.questions):
        return msgspec.json.encode(_named_answers(call, job, decided, model))
    answers = [
        _answer_of_openai(question, one)
        for question, one in zip(call.questions, decided.answers, strict=True)
    ]
    number = len(answers)
    usage = DecisionUsage(
        decided.num_tokens,
        InputTokenDetails(decided.num_cached),
        number,
        CompletionDetails(0),
        decided.num_tokens + number,
    )
    whole = DecisionList(job.asked.id, "decision", int(time.time()), model, answers, usage)
    return msgspec.json.encode(whole)


def _is_named(questions: Sequence[DecisionQuestion]) -> bool:
    """True for SGLang's form. The first question decides."""
    return questions[0].id is not None or questions[0].question is not None


def _refuse(question: DecisionQuestion, names: Sequence[str], path: str) -> None:
    for name in names:
        if getattr(question, name) is not None:
            message = f"{path}.{name} belongs to the other form of questions; use one form for all"
            raise ApiError(400, message, f"{path}.{name}", code="unsupported_parameter")


def _of_openai(question: DecisionQuestion, path: str) -> Question:
    """A question in OpenAI's form, which vLLM reads by letters. Raises ApiError."""
    _refuse(question, _OF_SGLANG, path)
    if question.type == "yes_no":
        raise ApiError(400, f"{path}.type must be predicate, choice or score", f"{path}.type")
    if question.instructions is None:
        name = f"{path}.instructions"
        raise ApiError(400, f"{name} is required", name, code="missing_required_parameter")
    text = text_of(question.instructions, f"{path}.instructions")
    if question.type == "predicate":
        sides = (AnswerOption("false"), AnswerOption("true"))
        return Question("yes_no", text, sides, "letters")
    if question.type == "choice":
        options = _options(question.choices, "value", f"{path}.choices")
        return Question("choice", text, options, "letters")
    levels = _options(question.levels, "label", f"{path}.levels")
    return Question("score", text, levels, "letters")


def _named(question: DecisionQuestion, path: str) -> Question:
    """A question in SGLang's form. Raises ApiError."""
    _refuse(question, _OF_OPENAI, path)
    if question.type == "predicate":
        raise ApiError(400, f"{path}.type must be yes_no, choice or score", f"{path}.type")
    for name in ("id", "question"):
        if not (getattr(question, name) or "").strip():
            message = f"{path}.{name} must be a text that is not blank"
            raise ApiError(400, message, f"{path}.{name}")
    text = question.question or ""
    if question.type == "yes_no":
        return Question.yes_no(text, question.yes, question.no)
    if question.type == "choice":
        options = _options(question.options, "name", f"{path}.options")
        return Question("choice", text, options, "letters")
    levels = _options(question.levels, "label", f"{path}.levels")
    try:
        return Question.score(text, [level.line for level in levels])
    except RequestError as error:
        raise ApiError(400, f"{path}.{error.message}", f"{path}.levels") from None


def _options(
    given: Sequence[DecisionOption | str] | None, name: str, path: str
) -> tuple[AnswerOption, ...]:
    """The options of a question, at least two and each once. Raises ApiError."""
    if given is None or len(given) < 2:
        raise ApiError(400, f"{path} must have at least two entries", path)
    found = []
    for index, one in enumerate(given):
        option = DecisionOption(**{name: one}) if isinstance(one, str) else one
        value = getattr(option, name)
        if value is None:
            raise ApiError(400, f"{path}[{index}].{name} is required", f"{path}[{index}].{name}")
        shown = msgspec.json.encode(value).decode() if name == "value" else str(value)
        found.append(AnswerOption(shown, option.description))
    names = [option.name.lower() if name == "name" else option.name for option in found]
    if len(set(names)) < len(names):
        raise ApiError(400, f"{path}: two entries are equal; give each once", path)
    return tuple(found)


def _check_ids(questions: Sequence[DecisionQuestion]) -> None:
    ids = [question.id for question in questions]
    if len(set(ids)) < len(ids):
        raise ApiError(400, "questions: two have the same id", "questions")


def _answer_of_openai(question: DecisionQuestion, one: TypedAnswer) -> DecisionAnswer:
    more = about(one)
    if question.type == "predicate":
        return DecisionAnswer(type="predicate", name=question.name, probability=one.yes, **more)
    if question.type == "choice":
        values = [_value(each, "value") for each in question.choices or ()]
        pairs = zip(values, one.probabilities, strict=True)
        return DecisionAnswer(
            type="choice",
            name=question.name,
            choice=values[one.best],
            probabilities=[ValueProbability(value, each) for value, each in pairs],
            confidence=one.top_mass,
            **more,
        )
    labels = [str(_value(each, "label")) for each in question.levels or ()]
    levels = enumerate(zip(labels, one.probabilities, strict=True))
    return DecisionAnswer(
        type="score",
        name=question.name,
        score=one.score,
        probabilities=[ValueProbability(place, each, label) for place, (label, each) in levels],
        confidence=one.top_mass,
        **more,
    )


def _named_answers(
    call: DecisionRequest, job: DecisionJob, decided: Decided, model: str
) -> NamedDecisions:
    answers: dict[str, NamedAnswer] = {}
    first = 0
    for place, one in enumerate(decided.answers):
        question = call.questions[place]
        number = job.readout.num_reads[place]
        read = job.readout.reads[first]
        first += number
        ids: list[int] | UnsetType = UNSET
        label_ids: list[int] | UnsetType = UNSET
        if call.return_prompt_token_ids:
            ids = read.prompt_ids
            label_ids = list(read.ids)
        names = [option.name for option in one.question.options]
        if question.type == "score":
            names = [str(index) for index in range(len(names))]
        more = about(one)
        answers[question.id or ""] = NamedAnswer(
            type=question.type,  # type: ignore[arg-type]  # a predicate has no id
            probabilities=dict(zip(names, one.probabilities, strict=True)),
            label_mass=more.pop("x_label_mass"),
            choice=one.answer if question.type == "choice" else UNSET,
            score=one.score if question.type == "score" else UNSET,
            prompt_token_ids=ids,
            label_token_ids=label_ids,
            **more,
        )
    usage = PlainUsage(decided.num_tokens, decided.num_tokens)
    return NamedDecisions("decisions", model, FORMAT_VERSION, answers, usage)


def _value(option: DecisionOption | str, name: str) -> str | bool:
    value: str | bool = option if isinstance(option, str) else getattr(option, name)
    return value


def about(one: TypedAnswer) -> dict[str, Any]:
    """What all forms of answers say about the reads."""
    found: dict[str, Any] = {"x_label_mass": one.label_mass, "x_labels": _LABELS[one.are_single]}
    if one.num_orders > 1:
        found["x_flips"] = one.flips
    if one.is_calibrated:
        found["x_calibrated"] = True
    return found
