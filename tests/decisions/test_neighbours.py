"""Rerankers, classifiers and scores, answered by the reads of decisions."""

import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from orca_jax.link.wire import Rejected, Submit, Updates
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import RequestUpdate, TokenLogprobs
from tests.decisions.test_routes import post, prompt_of, reads
from tests.serve.running import MODEL, Server

QUEUE = {
    "user": "u",
    "request_id": "r",
    "cache_salt": "s",
    "priority": 2,
    "timeout": 9,
    "queue_timeout": 8,
}
PRIORITY = ServerConfig(EngineConfig(model="m", scheduling_policy="priority"))


def check_queue(submit: Submit) -> None:
    assert (submit.urgency.tenant, submit.urgency.priority, submit.urgency.deadline) == ("u", 2, 9)
    assert submit.params.cache_salt.startswith("s")


def by_length(submit: Submit) -> Sequence[Updates | Rejected]:
    """The longer the prompt, the more probable is the second label."""
    ids = submit.params.logprob_token_ids
    each = min(0.4, len(submit.prompt_ids) / 4000)
    found = (math.log(0.5 - each), *[math.log(each)] * (len(ids) - 1))
    scores = TokenLogprobs(-1.0, 1, ids, found[: len(ids)], 0.5)
    update = RequestUpdate(submit.request_id, (65,), "length", logprobs=(scores,))
    return [Updates([update], running=0, waiting=0)]


@pytest.mark.conforms(
    "POST /v1/rerank",
    "POST /rerank",
    "POST /v2/rerank",
    "rerank.model",
    "rerank.query",
    "rerank.documents",
    "rerank.top_n",
    "rerank.return_documents",
    "rerank.instruction",
    "rerank.temperature",
    "rerank.cache_salt",
    "rerank.priority",
    "rerank.user",
    "rerank.request_id",
    "rerank.queue_timeout",
    "rerank.timeout",
)
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_judged_after_the_query(path: str) -> None:
    documents = ["a", {"text": "b" * 300}, "c" * 60]
    body = {"model": "m", "query": "q", "documents": documents, "instruction": "do", **QUEUE}
    body["temperature"] = 0.9
    answer, submitted, _ = post(path, body, by_length, PRIORITY)
    found = answer.json()
    assert found["id"] == "rerank-r" and found["model"] == "m"
    assert len(found["results"]) == 3
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {each["index"]: each["document"]["text"][0] for each in found["results"]} == {
        0: "a",
        1: "b",
        2: "c",
    }
    text = prompt_of(submitted[0])
    assert text.startswith("system: Judge whether the Document")
    assert "user: <Instruct>: do\n<Query>: q\n<Document>: a\nassistant:" in text
    assert text[: submitted[0].params.shared_tokens].endswith("<Query>: q\n")
    check_queue(submitted[0])
    answer, _, _ = post(path, {**body, "top_n": 1, "return_documents": False}, by_length, PRIORITY)
    (one,) = answer.json()["results"]
    assert "document" not in one


@pytest.mark.conforms(
    "POST /classify",
    "classify.model",
    "classify.input",
    "classify.labels",
    "classify.instructions",
    "classify.order",
    "classify.temperature",
    "classify.chat_template_kwargs",
    "classify.cache_salt",
    "classify.priority",
    "classify.user",
    "classify.request_id",
    "classify.queue_timeout",
    "classify.timeout",
)
def test_texts_get_one_of_the_given_labels() -> None:
    body = {"model": "m", "input": ["one", "two"], "labels": ["sea", "land"], **QUEUE}
    more = {"temperature": 0.5, "chat_template_kwargs": {"a": 1}, "instructions": "Where?"}
    answer, submitted, _ = post("/classify", {**body, **more}, reads(0.4, 0.1), PRIORITY)
    found = answer.json()
    assert found["id"] == "classify-r"
    assert [each["label"] for each in found["data"]] == ["sea", "sea"]
    assert found["data"][0]["probs"] == pytest.approx([16 / 17, 1 / 17])
    assert found["data"][1]["num_classes"] == 2
    assert prompt_of(submitted[1]).startswith("user: two\n\nQuestion: Where?\nA: sea\nB: land\n")
    check_queue(submitted[0])
    answer, submitted, _ = post(
        "/classify", {**body, "input": "x", "order": "averaged"}, config=PRIORITY
    )
    assert answer.json()["data"][0]["probs"] == pytest.approx([0.5, 0.5])
    assert len(submitted) == 2


@pytest.mark.conforms(
    "POST /v1/score",
    "score.model",
    "score.query",
    "score.items",
    "score.label_token_ids",
    "score.apply_softmax",
    "score.item_first",
    "score.temperature",
    "score.cache_salt",
    "score.priority",
    "score.user",
    "score.request_id",
    "score.queue_timeout",
    "score.timeout",
)
def test_scores_in_the_form_of_sglang() -> None:
    body = {"model": "m", "query": "ab", "items": ["c", "de"], "label_token_ids": [66, 65], **QUEUE}
    answer, submitted, ends = post("/v1/score", body, reads(0.4, 0.1), PRIORITY)
    found = answer.json()
    assert found["object"] == "scoring" and ends == {"stop": 2}
    assert found["scores"] == [pytest.approx([0.4, 0.1])] * 2
    assert found["usage"]["prompt_tokens"] == 5
    assert [prompt_of(submit) for submit in submitted] == ["abc", "abde"]
    assert submitted[0].params.logprob_token_ids == (66, 65)
    assert submitted[0].params.shared_tokens == 2
    check_queue(submitted[0])
    more = {"apply_softmax": True, "temperature": 0.5, "item_first": True, "items": [[99], [100]]}
    answer, submitted, _ = post("/v1/score", {**body, **more}, reads(0.4, 0.1), PRIORITY)
    assert answer.json()["scores"][0] == pytest.approx([16 / 17, 1 / 17])
    assert [prompt_of(submit) for submit in submitted] == ["cab", "dab"]


@pytest.mark.conforms(
    "POST /generative_scoring",
    "generative_scoring.model",
    "generative_scoring.query",
    "generative_scoring.items",
    "generative_scoring.label_token_ids",
    "generative_scoring.apply_softmax",
    "generative_scoring.item_first",
    "generative_scoring.temperature",
    "generative_scoring.cache_salt",
    "generative_scoring.priority",
    "generative_scoring.user",
    "generative_scoring.request_id",
    "generative_scoring.queue_timeout",
    "generative_scoring.timeout",
)
def test_scores_in_the_form_of_vllm() -> None:
    body = {"model": "m", "query": [97], "items": "b", "label_token_ids": [66, 65], **QUEUE}
    path = "/generative_scoring"
    answer, submitted, _ = post(path, {**body, "temperature": 0.5}, reads(0.4, 0.1), PRIORITY)
    (one,) = answer.json()["data"]
    assert one == {"index": 0, "object": "score", "score": pytest.approx(16 / 17)}
    assert answer.json()["id"] == "score-r"
    check_queue(submitted[0])
    more = {"apply_softmax": False, "item_first": True}
    answer, submitted, _ = post(path, {**body, **more}, reads(0.4, 0.1), PRIORITY)
    assert answer.json()["data"][0]["score"] == pytest.approx(0.4)
    assert prompt_of(submitted[0]) == "ba"


@pytest.mark.conforms(
    "rerank.without effect",
    "classify.without effect",
    "score.without effect",
    "generative_scoring.without effect",
)
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["x" * 2000]}, "query"),
        ("/v1/rerank", {"top_n": 0}, "top_n"),
        ("/v1/rerank", {"max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ("/classify", {"labels": ["a"]}, "labels"),
        ("/classify", {"labels": ["a", "a"]}, "labels"),
        ("/classify", {"labels": None}, "labels"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"metadata": 3, "made_up": 1}, "made_up"),
        ("/v1/score", {"label_token_ids": [3, 3]}, "label_token_ids"),
        ("/v1/score", {"label_token_ids": [257]}, "label_token_ids"),
        ("/v1/score", {"label_token_ids": [1] * 301}, "label_token_ids"),
        ("/v1/score", {"temperature": 2}, "temperature"),
        ("/v1/score", {"items": [""]}, "items"),
        ("/v1/score", {"query": [300]}, "query"),
        ("/v1/score", {"made_up": 1}, "made_up"),
        ("/generative_scoring", {"items": "x" * 2000}, "items"),
        ("/generative_scoring", {"apply_softmax": False, "temperature": 2}, "temperature"),
        ("/generative_scoring", {"made_up": 1}, "made_up"),
    ],
)
def test_a_wrong_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    bodies = {
        "/v1/rerank": {"query": "q", "documents": ["a"]},
        "/classify": {"input": "x", "labels": ["a", "b"]},
        "/v1/score": {"query": "q", "items": ["a"], "label_token_ids": [1]},
        "/generative_scoring": {"query": "q", "items": ["a"], "label_token_ids": [1]},
    }
    answer, submitted, _ = post(path, {"model": "m", **bodies[path], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not submitted


def test_the_prompt_of_a_decision_is_scored_alike(idle_server: Server) -> None:
    """The prompt and the labels that SGLang's form shows give the same probabilities to its route of scores."""
    question = {"id": "c", "type": "choice", "question": "Team?", "options": ["x", "y"]}
    body = {"input": "s", "questions": [question], "return_prompt_token_ids": True}
    answer = httpx.post(f"{idle_server.url}/v1/decisions", json={"model": MODEL, **body}).json()
    one = answer["answers"]["c"]
    ids = one["prompt_token_ids"]
    scored = {
        "model": MODEL,
        "query": ids[:9],
        "items": [ids[9:]],
        "label_token_ids": one["label_token_ids"],
        "apply_softmax": True,
    }
    scores = httpx.post(f"{idle_server.url}/v1/score", json=scored).json()["scores"]
    assert scores == [list(one["probabilities"].values())]
