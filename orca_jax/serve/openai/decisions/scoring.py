"""`POST /v1/score` of SGLang and `POST /generative_scoring` of vLLM: probabilities of given tokens after texts."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from orca_jax.link.admission import Deadlines
from orca_jax.link.wire import Submit
from orca_jax.serve.openai import single
from orca_jax.serve.openai.decisions.call import checked_length, new_id, salted, scores_in
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Receive
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.preparation import check_ids, check_urgency, urgency_of
from orca_jax.serve.openai.schema.decisions.answers import PlainUsage
from orca_jax.serve.openai.schema.decisions.neighbours import (
    ItemScore,
    ItemScores,
    ScoreList,
    ScoreRequest,
)
from orca_jax.serve.openai.single import SingleAnswer, SingleJob
from orca_jax.text.decisions.reads import Read, softmax
from orca_jax.values.request import TokenLogprobs

SCORE = "/v1/score"
GENERATIVE = "/generative_scoring"


class ScoreJob(NamedTuple):
    """A prepared call, and the tokens of its prompts: those of the query once."""

    requests: SingleJob[TokenLogprobs]
    num_tokens: int


async def prepare(
    service: Service, call: ScoreRequest, endpoint: str, name: str, caller: str | None
) -> ScoreJob:
    """Check a call and make its reads. The query and each item are encoded apart. Raises ApiError."""
    check_urgency(service, call)
    if len(set(call.label_token_ids)) < len(call.label_token_ids):
        raise ApiError(400, "label_token_ids must be different from each other", "label_token_ids")
    check_ids(service.model, call.label_token_ids, "label_token_ids")
    if call.temperature is not None and not _is_softmax(call, endpoint):
        raise ApiError(400, "temperature needs apply_softmax: true", "temperature")
    items = [call.items] if isinstance(call.items, str) else call.items
    (query,) = await _encoded(service, [call.query], "query", begins=not call.item_first)
    ends = await _encoded(service, items, "items", begins=bool(call.item_first))
    shared = 0 if call.item_first else len(query)
    prompts = [[*item, *query] if call.item_first else [*query, *item] for item in ends]
    reads = [Read(prompt, tuple(call.label_token_ids)) for prompt in prompts]
    checked_length(service, reads, "items")
    salt = salted(service, call, caller)
    urgency = urgency_of(call, caller)
    adapter = service.adapter_of(call.model)
    new = service.client.new_request_id
    submits = [
        Submit(new(), read.prompt_ids, read.params(shared, salt), urgency, adapter)
        for read in reads
    ]
    deadlines = Deadlines(call.queue_timeout, call.timeout)
    name = new_id(call, name, "score")
    job = SingleJob(name, endpoint, submits, deadlines, scores_in, "items", "items")
    return ScoreJob(job, shared + sum([len(prompt) - shared for prompt in prompts]))


async def run(
    service: Service, call: ScoreRequest, job: ScoreJob, receive: Receive
) -> SingleAnswer:
    """Run a call to its end, and return its answer. Errors as in `single.run`."""
    finished = await single.run(service, job.requests, receive)
    body = _answer(call, job, finished.results, service.answering(call.model))
    return SingleAnswer(body, finished.weight_version)


def _answer(
    call: ScoreRequest, job: ScoreJob, results: Sequence[TokenLogprobs], model: str
) -> bytes:
    """The JSON of an answer, in the form of its route."""
    requests = job.requests
    usage = PlainUsage(job.num_tokens, job.num_tokens)
    is_softmax = _is_softmax(call, requests.endpoint)
    scores = [_scores(one, call.temperature or 1.0, is_softmax=is_softmax) for one in results]
    if requests.endpoint == SCORE:
        return msgspec.json.encode(ScoreList("scoring", model, scores, usage))
    data = [ItemScore(index, "score", each[0]) for index, each in enumerate(scores)]
    whole = ItemScores(requests.id, "list", int(time.time()), model, data, usage)
    return msgspec.json.encode(whole)


def _is_softmax(call: ScoreRequest, endpoint: str) -> bool:
    """True for probabilities among the given tokens; SGLang's default is among all tokens."""
    if call.apply_softmax is None:
        return endpoint == GENERATIVE
    return call.apply_softmax


def _scores(one: TokenLogprobs, temperature: float, *, is_softmax: bool) -> list[float]:
    if is_softmax:
        return softmax(one.top_logprobs, temperature)
    return [math.exp(each) for each in one.top_logprobs]


async def _encoded(
    service: Service, parts: Sequence[str | list[int]], param: str, *, begins: bool
) -> list[list[int]]:
    """The tokens of texts or ids. Those that begin a prompt have the special tokens of the tokenizer."""
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(await service.encode_all(texts, param, begins))
    found = [next(encoded) if isinstance(part, str) else part for part in parts]
    for ids in found:
        check_ids(service.model, ids, param)
    if not all(found):
        raise ApiError(400, f"{param} must have at least one token", param)
    return found
