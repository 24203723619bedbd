"""`POST /v1/rerank` and `POST /classify`: a question about each document, and about each text."""

import time
from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.decisions.call import AskedDecisions, Decided, DecisionJob, new_id
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.decisions.answers import PlainUsage
from orca_jax.serve.openai.schema.decisions.neighbours import (
    Classified,
    ClassifyRequest,
    ClassList,
    Reranked,
    RerankList,
    RerankRequest,
    RerankText,
)
from orca_jax.text.decisions.questions import Question
from orca_jax.values.errors import RequestError

RERANK = "/v1/rerank"
RERANKS = (RERANK, "/rerank", "/v2/rerank")
CLASSIFY = "/classify"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_WHICH = "Which label fits the text best?"


def reranking(call: RerankRequest, name: str) -> AskedDecisions:
    """The question of Qwen3-Reranker about each document, after the query."""
    questions = [
        replace(Question.yes_no(f"<Document>: {_text(each)}"), is_plain=True)
        for each in call.documents
    ]
    return AskedDecisions(
        id=new_id(call, name, "rerank"),
        endpoint=RERANK,
        fields=call,
        state_param="query",
        questions_param="documents",
        state=f"<Instruct>: {call.instruction or _INSTRUCTION}\n<Query>: {call.query}",
        separator="\n",
        before=[{"role": "system", "content": _JUDGE}],
        questions=questions,
    )


def reranked(call: RerankRequest, job: DecisionJob, decided: Decided, model: str) -> bytes:
    """The JSON of an answer: the most relevant documents first, and equal ones in their order."""
    found = []
    for index, one in enumerate(decided.answers):
        document: RerankText | UnsetType = UNSET
        if call.return_documents is not False:
            document = RerankText(_text(call.documents[index]))
        found.append(Reranked(index, one.yes, one.label_mass, document))
    found.sort(key=lambda each: -each.relevance_score)
    usage = PlainUsage(decided.num_tokens, decided.num_tokens)
    return msgspec.json.encode(RerankList(job.asked.id, model, found[: call.top_n], usage))


def classifying(call: ClassifyRequest, name: str) -> AskedDecisions:
    """A choice among the labels, after each text. Raises ApiError."""
    texts = [call.input] if isinstance(call.input, str) else call.input
    try:
        one = Question.choice(call.instructions or _WHICH, call.labels)
    except RequestError:
        raise ApiError(400, "labels must be different from each other", "labels") from None
    return AskedDecisions(
        id=new_id(call, name, "classify"),
        endpoint=CLASSIFY,
        fields=call,
        state_param="input",
        questions_param="input",
        state="",
        questions=[replace(one, before=f"{text}\n\n") for text in texts],
        order=call.order or "given",
        variables=call.chat_template_kwargs or {},
    )


def classified(call: ClassifyRequest, job: DecisionJob, decided: Decided, model: str) -> bytes:
    """The JSON of an answer."""
    data = [
        Classified(index, one.answer, list(one.probabilities), len(call.labels), one.label_mass)
        for index, one in enumerate(decided.answers)
    ]
    usage = PlainUsage(decided.num_tokens, decided.num_tokens)
    whole = ClassList(job.asked.id, "list", int(time.time()), model, data, usage)
    return msgspec.json.encode(whole)


def _text(document: str | RerankText) -> str:
    return document if isinstance(document, str) else document.text
