"""A call for decisions in one form for all APIs, its requests, and its answers."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orca_jax.link.admission import Deadlines
from orca_jax.link.wire import Submit
from orca_jax.serve.openai import single
from orca_jax.serve.openai.asked import TemplateMessage, TemplatePrompt
from orca_jax.serve.openai.errors import ApiError, PromptTooLong
from orca_jax.serve.openai.generation import Receive
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import check_urgency, rendered, salt_of, urgency_of
from orca_jax.serve.openai.schema.decisions.bodies import ReadFields
from orca_jax.serve.openai.single import SingleJob
from orca_jax.text.decisions.prompts import VARIABLES, PromptFrame, marked
from orca_jax.text.decisions.questions import Question
from orca_jax.text.decisions.reads import OptionOrder, Read, Readout, TypedAnswer, own_salt, reading
from orca_jax.values.errors import RequestError
from orca_jax.values.request import RequestUpdate, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDecisions:
    """A call, understood.

    Attributes:
        id: id of the answer.
        endpoint: the route, in metrics and logs.
        fields: the fields that all APIs share.
        state_param: the field with the state.
        state: the text before each question; empty for none.
        before: the messages before it.
        questions: the questions in order.
        questions_param: the field with them.
        separator: the text between the state and a question.
        order: the order of options.
        variables: further variables of the chat template.
    """

    id: str
    endpoint: str
    fields: ReadFields
    state_param: str
    state: str
    before: Sequence[TemplateMessage] = ()
    questions: Sequence[Question]
    questions_param: str = "questions"
    separator: str = "\n\n"
    order: OptionOrder = "given"
    variables: Mapping[str, object] = field(default_factory=dict)


class DecisionJob(NamedTuple):
    """A prepared call."""

    asked: AskedDecisions
    readout: Readout
    requests: SingleJob[TokenLogprobs]


class Decided(NamedTuple):
    """The answers of a call, and what its prompts needed.

    Attributes:
        answers: in the order of the questions.
        num_tokens: tokens of the state once, and of each question.
        num_cached: tokens of these from the prefix cache, before this call.
        weight_version: the version of the weights.
    """

    answers: Sequence[TypedAnswer]
    num_tokens: int
    num_cached: int
    weight_version: int


async def prepare(
    service: Service, asked: AskedDecisions, caller: str | None = None
) -> DecisionJob:
    """Check a call and make its reads, so that the engine accepts all of them or nothing.

    Args:
        service: the served model.
        asked: the call.
        caller: digest of the API key; None on a server without keys.

    Raises:
        ApiError: a field is wrong.
    """
    fields = asked.fields
    check_urgency(service, fields)
    try:
        readout = await _readout(service, asked)
    except ApiError as error:
        error.rename({"messages": asked.state_param})
        raise
    checked_length(service, readout.reads, asked.state_param)
    salt = salted(service, fields, caller)
    urgency = urgency_of(fields, caller)
    adapter = service.adapter_of(fields.model)
    new_id = service.client.new_request_id
    submits = [
        Submit(new_id(), read.prompt_ids, read.params(readout.shared, salt), urgency, adapter)
        for read in readout.reads
    ]
    deadlines = Deadlines(fields.queue_timeout, fields.timeout)
    job = SingleJob(
        asked.id,
        asked.endpoint,
        submits,
        deadlines,
        scores_in,
        asked.state_param,
        asked.questions_param,
    )
    return DecisionJob(asked, readout, job)


async def run(service: Service, job: DecisionJob, receive: Receive) -> Decided:
    """Run a call to its end. Errors as in `single.run`."""
    finished = await single.run(service, job.requests, receive)
    readout = job.readout
    answers = readout.decisions(
        finished.results, job.asked.fields.temperature or 1.0, service.calibration
    )
    for one in answers:
        service.observer.decided(one.question.kind, one.label_mass)
    own = sum([len(read.prompt_ids) - readout.shared for read in readout.reads])
    cached = min(readout.shared, finished.num_cached[0])
    return Decided(answers, readout.shared + own, cached, finished.weight_version)


def checked_length(service: Service, reads: Sequence[Read], param: str) -> None:
    """Raise ApiError if a prompt leaves no room for its token. `param` is the field with the state."""
    context = service.model.context
    longest = max([len(read.prompt_ids) for read in reads])
    if longest >= context:
        message = (
            f"this model's maximum context length is {context} tokens, and {param} with a question has {longest}; "
            "shorten it"
        )
        raise PromptTooLong(message, param, longest, context - 1)


def salted(service: Service, fields: ReadFields, caller: str | None) -> str:
    """The salt of the reads of a call."""
    summary = service.client.summary
    reuses = summary is not None and summary.reuses_prefixes
    return own_salt(salt_of(service, fields, caller), reuses_prefixes=reuses)


def new_id(fields: ReadFields, name: str, prefix: str) -> str:
    """The id of an answer."""
    return f"{prefix}-{fields.request_id or name or uuid.uuid4().hex}"


async def _readout(service: Service, asked: AskedDecisions) -> Readout:
    """The reads of a call. Raises ApiError."""
    variables = asked.variables
    if any([variables.get(name) for name in VARIABLES]):
        name = "chat_template_kwargs"
        message = f"{name}: a decision has no thought; leave out {' and '.join(VARIABLES)}"
        raise ApiError(400, message, name, code="unsupported_parameter")
    frame = await _frame(service, asked)
    state_ids = await service.encode(frame.head, asked.state_param, False)
    model = service.model

    def encode(question: str) -> list[int]:
        if len(question) > model.max_characters:
            raise RequestError(
                f"a question has {len(question)} characters; shorten it", "questions"
            )
        return model.tokenizer.encode(question + frame.tail, False)

    def read() -> Readout:
        labels = service.labels_at(frame.tail)
        return reading(asked.questions, state_ids, encode, labels, asked.order)

    # each prompt repeats the state
    size = sum([question.size + len(state_ids) for question in asked.questions])
    return await service.encoding(read, asked.questions_param, size)


async def _frame(service: Service, asked: AskedDecisions) -> PromptFrame:
    """The texts around the questions of a call. Raises ApiError."""
    conversation = marked(asked.state, asked.before, asked.separator)
    messages = [dict(message) for message in conversation.messages]
    prompt = TemplatePrompt(messages, variables={**VARIABLES, **asked.variables})
    text = await rendered(service, prompt, [])
    template = service.model.template
    assert template is not None, "a conversation was rendered without a template"
    try:
        return conversation.frame(text, template.tool_source)
    except RequestError as error:
        raise ApiError(400, error.message, error.param, code="unsupported_model") from None


def scores_in(update: RequestUpdate) -> TokenLogprobs | None:
    """The scores in the last update of a read; None if it has none."""
    if not update.logprobs:
        return None
    return update.logprobs[-1]
