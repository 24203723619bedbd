"""Hostile and oversized calls for decisions, and what they share with chats: keys, quotas, tenants and deadlines."""

import asyncio
import json
import threading
from collections import Counter
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from orca_jax.link.wire import Submit
from orca_jax.server_config import ServerConfig
from orca_jax.text.decisions.questions import MAX_OPTIONS
from orca_jax.values.config import EngineConfig
from tests.decisions.test_routes import CHOICE, NAMED, PREDICATE, SCORE, SYSTEM, post, reads
from tests.mutations import mutate_bytes, mutate_json
from tests.serve.played import Stage, on_stage
from tests.serve.running import MODEL, Server

NUM_BODIES = 1000
JSON = {"content-type": "application/json"}
RERANK = {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}
SCORES = {"query": "q", "items": ["a", [65, 66]], "label_token_ids": [65, 66]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/decisions": [
        {"input": "s", "questions": [PREDICATE, CHOICE, SCORE], "order": "averaged"},
        {"input": {"a": 1}, "questions": NAMED, "temperature": 0.5},
        {"input": [{"role": "user", "content": "x"}], "questions": [SCORE], "cache_salt": "s"},
    ],
    "/v1/systemone": [{"state": ["s"], "questions": SYSTEM, "timeout": 9}],
    "/v1/rerank": [RERANK],
    "/rerank": [RERANK],
    "/v2/rerank": [RERANK],
    "/classify": [{"input": ["x", "y"], "labels": ["a", "b"], "priority": 0}],
    "/v1/score": [SCORES],
    "/generative_scoring": [{**SCORES, "apply_softmax": True}],
}
FIRST = {path: bodies[0] for path, bodies in BODIES.items()}
KEYS = ServerConfig(EngineConfig(model="m"), api_key=("sk-one", "sk-two"))


def never(submit: Submit) -> list[Any]:
    """An engine that does not answer."""
    return []


def malformed(draw: Random) -> tuple[str, bytes]:
    """A route, and a body for it with damages, most of them JSON."""
    path = draw.choice([*BODIES])
    body = json.dumps({"model": MODEL, **draw.choice(BODIES[path])}).encode()
    if draw.random() < 0.2:
        return path, mutate_bytes(body, draw)
    return path, mutate_json(body, draw)


def check_refusal(answer: httpx.Response, body: bytes) -> None:
    """The body of an error says what is wrong, and which field, if the body is an object of JSON."""
    assert 400 <= answer.status_code < 500, body[:500]
    whole = answer.json()
    try:
        is_object = isinstance(msgspec.json.decode(body), dict)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
    ):  # Python's reader takes NaN and halves of pairs
        is_object = False
    if answer.status_code == 422:
        (fault,) = whole["detail"]
        assert fault["msg"] and fault["loc"][0] == "body"
        assert len(fault["loc"]) > 1 or not is_object, body[:500]
        return
    if "detail" in whole:
        assert whole["detail"]["message"]
        return
    error = whole["error"]
    assert error["message"]
    assert error["param"] or not is_object, (error, body[:500])


def test_a_thousand_malformed_bodies_are_refused_by_their_fields() -> None:
    async def act(stage: Stage) -> Counter[int]:
        draw = Random(7)
        found: Counter[int] = Counter()
        async with stage.http() as http:
            while found.total() - found[200] < NUM_BODIES:
                path, body = malformed(draw)
                answer = await http.post(path, content=body, headers=JSON)
                found[answer.status_code] += 1
                if answer.status_code != 200:
                    check_refusal(answer, body)
        return found

    config = ServerConfig(EngineConfig(model=MODEL))
    found = on_stage(reads(0.4, 0.1), act, config, chats=True)
    assert found[400] > 500 and found[422] > 50
    assert set(found) <= {200, 400, 404, 413, 422}, found


def test_a_chat_beside_malformed_bodies_is_the_same(idle_server: Server) -> None:
    fields = {"max_tokens": 60, "seed": 3, "temperature": 1.0, "ignore_eos": True}

    def chat() -> str:
        choice = idle_server.complete("hello", **fields).json()["choices"][0]
        return str(choice["text"])

    alone = chat()
    beside: list[str] = []
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            beside.append(chat())

    thread = threading.Thread(target=repeat)
    thread.start()
    draw = Random(11)
    try:
        with httpx.Client(base_url=idle_server.url, timeout=60) as http:
            for _ in range(100):
                path, body = malformed(draw)
                answer = http.post(path, content=body, headers=JSON)
                assert answer.status_code < 500, body[:500]
    finally:
        is_over.set()
        thread.join()
    assert set(beside) == {alone}
    idle_server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{**CHOICE, "choices": ["x"] * 256}]}, "questions[0].choices"),
        (
            {"questions": [{**CHOICE, "choices": [str(n) for n in range(MAX_OPTIONS)]}] * 400},
            "questions",
        ),
    ],
    ids=["questions", "options", "both"],
)
def test_questions_times_options_are_bounded(fields: dict[str, Any], param: str) -> None:
    answer, submitted, _ = post("/v1/decisions", {"model": "m", "input": "s", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not submitted


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/decisions", {"input": "s", "questions": [PREDICATE] * 70}, "questions"),
        ("/v1/rerank", {**RERANK, "documents": ["d"] * 70}, "documents"),
        ("/v1/score", {**SCORES, "items": ["d"] * 70}, "items"),
    ],
)
def test_a_call_that_no_queue_holds_names_its_field(
    path: str, fields: dict[str, Any], param: str
) -> None:
    config = ServerConfig(EngineConfig(model="m"), max_num_queued_reqs=3)
    answer, _, _ = post(path, {"model": "m", **fields}, never, config)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "call_too_large", param)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("limit", ["timeout", "queue_timeout"])
def test_a_deadline_ends_all_reads(path: str, limit: str) -> None:
    async def act(stage: Stage) -> tuple[int, list[str], list[str]]:
        body = {**FIRST[path], "timeout": None, "model": "m", limit: 0.05}
        async with stage.http() as http:
            answer = await http.post(path, json=body)
        names = [submit.request_id for submit in stage.link.submitted]
        return answer.status_code, names, stage.link.aborted

    status, names, aborted = on_stage(never, act, chats=True)
    assert status == {"timeout": 408, "queue_timeout": 503}[limit]
    assert len(names) > 1
    assert sorted(aborted) == sorted(names)


@pytest.mark.parametrize("path", BODIES)
def test_keys_are_tenants_and_salts(path: str) -> None:
    async def act(stage: Stage) -> list[tuple[int, list[Submit]]]:
        found = []
        async with stage.http() as http:
            for key in ("sk-one", "sk-two", "sk-wrong"):
                headers = {"authorization": f"Bearer {key}"}
                before = len(stage.link.submitted)
                answer = await http.post(path, json={**FIRST[path], "user": "u"}, headers=headers)
                found.append((answer.status_code, stage.link.submitted[before:]))
        return found

    (one, ours), (two, theirs), (wrong, nothing) = on_stage(reads(0.4, 0.1), act, KEYS, chats=True)
    assert (one, two, wrong) == (200, 200, 401) and not nothing
    (our_tenant,) = {submit.urgency.tenant for submit in ours}
    (their_tenant,) = {submit.urgency.tenant for submit in theirs}
    assert our_tenant != their_tenant and "u" not in (our_tenant, their_tenant)
    salts = [{submit.params.cache_salt for submit in each} for each in (ours, theirs)]
    assert not salts[0] & salts[1]


@pytest.mark.parametrize("path", BODIES)
def test_the_quota_of_a_key_counts_calls(path: str) -> None:
    """A call with many reads is one call; while it is open, the next one is refused."""

    async def act(stage: Stage) -> tuple[int, int]:
        headers = {"authorization": "Bearer sk-one"}
        body = {**FIRST[path], "timeout": 0.5}
        async with stage.http() as http:
            first = asyncio.create_task(http.post(path, json=body, headers=headers))
            while not stage.link.submitted:
                await asyncio.sleep(0.01)
            second = await http.post(path, json=body, headers=headers)
            return (await first).status_code, second.status_code

    config = ServerConfig(EngineConfig(model="m"), api_key=("sk-one",), max_calls_per_key=1)
    assert on_stage(never, act, config, chats=True) == (408, 429)
