"""`POST /v1/embeddings`: OpenAI's fields and client, limits, failures and hang-ups."""

import asyncio
import base64
import json
import math
from array import array
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from orca_jax.link.wire import Rejected, Submit, Updates
from orca_jax.serve.openai.model import _dimensions
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import toy_pooled
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import RequestUpdate, Urgency
from orca_jax.values.step import NOT_FINITE
from tests.serve.played import Script, Stage, on_stage
from tests.serve.running import MODEL, Server

VECTOR = (3.0, 0.0, -4.0)


def pooled(*numbers: float) -> Script:
    """An engine that answers each request with this vector."""

    def script(submit: Submit) -> list[Updates | Rejected]:
        update = RequestUpdate(submit.request_id, (), "stop", pooled=array("f", numbers).tobytes())
        return [Updates([update], running=0, waiting=0)]

    return script


def post(
    body: dict[str, Any],
    script: Script | None = None,
    config: ServerConfig | None = None,
    **model: Any,
) -> tuple[httpx.Response, list[Submit], dict[str, float]]:
    async def act(stage: Stage) -> tuple[httpx.Response, list[Submit], dict[str, float]]:
        for name, value in model.items():
            object.__setattr__(stage.service.model, name, value)
        async with stage.http() as http:
            answer = await http.post("/v1/embeddings", json={"model": "m", **body})
        return answer, stage.link.submitted, stage.ends()

    return on_stage(script or pooled(*VECTOR), act, config)


def expected(ids: list[int]) -> list[float]:
    total, sums = 0, []
    for number, token in enumerate(ids, start=1):
        total += number * (token + 1)
        sums.append(total)
    raw = array("f", toy_pooled(sums, "last", 257))
    return [value / math.hypot(*raw) for value in raw]


@pytest.mark.conforms(
    "POST /v1/embeddings", "embeddings.model", "embeddings.input", "embeddings.encoding_format"
)
def test_the_client_of_openai(idle_server: Server) -> None:
    """It asks for base64 by itself, and decodes it."""
    client = openai.OpenAI(base_url=f"{idle_server.url}/v1", api_key="none")
    texts: list[tuple[Any, list[list[int]]]] = [("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]])]
    for given, ids in (*texts, ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])):
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model=MODEL, input=given, **options)  # type: ignore[arg-type]
            assert (answer.object, answer.model) == ("list", MODEL)
            assert [one.index for one in answer.data] == list(range(len(ids)))
            for one, its_ids in zip(answer.data, ids, strict=True):
                vector: Any = one.embedding
                if isinstance(vector, str):
                    vector = list(array("f", base64.b64decode(vector)))
                assert vector == pytest.approx(expected(its_ids), rel=1e-6)
            count = sum(map(len, ids))
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="ab", dimensions=1)
    assert caught.value.param == "dimensions" and "is_matryoshka" in str(caught.value)


@pytest.mark.conforms("embeddings.pooling", "embeddings.normalize", "embeddings.cache_salt")
def test_forms_of_a_vector() -> None:
    answer, (submit,), ends = post({"input": "x"})
    assert answer.json()["data"] == [
        {"object": "embedding", "index": 0, "embedding": pytest.approx([0.6, 0, -0.8])}
    ]
    assert (submit.params.pooling, submit.params.max_tokens, ends) == ("last", 1, {"stop": 1})
    answer, (submit,), _ = post(
        {"input": "x", "normalize": False, "pooling": "mean", "cache_salt": "s"}
    )
    assert answer.json()["data"][0]["embedding"] == list(VECTOR)
    assert (submit.params.pooling, submit.params.cache_salt) == ("mean", "s")
    answer, _, _ = post({"input": "x", "encoding_format": "base64", "normalize": False})
    assert array("f", base64.b64decode(answer.json()["data"][0]["embedding"])).tolist() == list(
        VECTOR
    )
    answer, _, _ = post({"input": "x", "dimensions": 2}, dimensions=())
    assert answer.json()["data"][0]["embedding"] == [1, 0], "shortened, then scaled"


@pytest.mark.conforms("embeddings.without effect")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [257]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1] * 1025}, "input"),
        ({"input": ["x"] * 1025}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 2}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "pooling": "cls"}, "pooling"),
        ({"input": "x", "priority": 1}, "priority"),
        ({"input": "x", "input_type": "query"}, "input_type"),
        ({"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "x", "made_up": 3}, "made_up"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    answer, submitted, _ = post(body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert not submitted


@pytest.mark.conforms("embeddings.dimensions")
def test_dimensions_are_those_of_the_model(tmp_path: Path) -> None:
    for values, sizes in (
        ({}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [2, 4]}, (2, 4)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert _dimensions(str(tmp_path)) == sizes
    assert _dimensions("") is None
    for wanted, status in ((2, 200), (3, 400)):
        assert (
            post({"input": "x", "dimensions": wanted}, dimensions=(2, 4))[0].status_code == status
        )
    answer, _, _ = post({"input": "x", "dimensions": 4}, dimensions=())
    assert answer.status_code == 400 and "at most 3" in answer.json()["error"]["message"]
    answer, _, _ = post({"input": "x", "dimensions": 3, "normalize": False}, dimensions=())
    assert answer.json()["data"][0]["embedding"] == list(VECTOR)


class MarkingTokenizer(ByteTokenizer):
    """Bytes, after an id that marks the beginning."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([256] if add_special_tokens else []), *super().encode(text, add_special_tokens)]


@pytest.mark.conforms(
    "embeddings.user",
    "embeddings.priority",
    "embeddings.request_id",
    "embeddings.add_special_tokens",
)
def test_the_place_in_the_queue_and_the_ids() -> None:
    config = ServerConfig(EngineConfig(model="m", scheduling_policy="priority"))
    body = {"input": "x", "user": "u", "priority": -3, "timeout": 9, "request_id": "mine"}
    answer, (submit,), _ = post(body, config=config, tokenizer=MarkingTokenizer())
    assert submit.urgency == Urgency(-3, "u", 9) and submit.prompt_ids == [256, 120]
    assert answer.json()["id"] == "embd-mine"
    _, (submit,), _ = post(
        {**body, "add_special_tokens": False}, config=config, tokenizer=MarkingTokenizer()
    )
    assert submit.prompt_ids == [120]


def test_a_context_may_be_full() -> None:
    assert post({"input": [1] * 1024})[0].status_code == 200


@pytest.mark.conforms("embeddings.timeout", "embeddings.queue_timeout")
def test_failures() -> None:
    def failing(submit: Submit) -> list[Updates | Rejected]:
        return [Updates([RequestUpdate(submit.request_id, (), "error", error=NOT_FINITE)], 0, 0)]

    answer, _, ends = post({"input": "x"}, failing)
    assert answer.status_code == 500 and ends == {"error": 1}
    answer, _, _ = post(
        {"input": "x"}, lambda submit: [Rejected(submit.request_id, "too long", "prompt")]
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    full = ServerConfig(EngineConfig(model="m"), max_num_queued_reqs=0)
    assert post({"input": ["x"] * 65}, config=full)[0].status_code in (400, 503)
    answer, _, _ = post({"input": "x", "queue_timeout": 0.05}, lambda submit: [])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
    answer, _, ends = post({"input": "x", "timeout": 0.05}, lambda submit: [])
    assert answer.status_code == 408 and ends == {"timeout": 1}


def test_a_hang_up_aborts_the_requests() -> None:
    async def act(stage: Stage) -> list[str]:
        async with stage.http() as http:
            call = asyncio.create_task(
                http.post("/v1/embeddings", json={"model": "m", "input": ["x", "y"]})
            )
            while len(stage.link.submitted) < 2:
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return stage.link.aborted

    assert len(on_stage(lambda submit: [], act)) == 2
