"""`POST /v1/decisions` and `POST /v1/systemone`: fields of all three forms, limits, failures and hostile bodies."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from orca_jax import LLM, Question
from orca_jax.link.wire import Rejected, Submit, Updates
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import RequestUpdate, TokenLogprobs, Urgency
from orca_jax.values.step import NOT_FINITE
from tests.serve.played import Script, Stage, on_stage
from tests.serve.running import MODEL, Server

PREDICATE = {"type": "predicate", "instructions": "Broken?"}
CHOICE = {
    "type": "choice",
    "name": "team",
    "instructions": "Team?",
    "choices": [{"value": "true", "description": "a text"}, {"value": True}],
}
SCORE = {
    "type": "score",
    "instructions": "How bad?",
    "levels": [{"label": "low"}, {"label": "high"}],
}
NAMED = [
    {"id": "c", "type": "choice", "question": "Team?", "options": [{"name": "x"}, {"name": "y"}]},
    {"id": "s", "type": "score", "question": "How bad?", "levels": ["low", "high"]},
    {"id": "b", "type": "yes_no", "question": "Urgent?", "yes": "now", "no": None},
]
SYSTEM = {
    "n": {"type": "noul", "instructions": "Urgent?", "criteria": {"true": "now"}},
    "c": {"type": "choice", "instructions": {"q": 1}, "criteria": {"x": None, "y": ["d"]}},
    "s": {"type": "score", "instructions": "How bad?", "criteria": ["low", "high", "worst"]},
}


def reads(*probabilities: float) -> Script:
    """An engine that gives the i-th label of each read the i-th probability."""

    def script(submit: Submit) -> Sequence[Updates | Rejected]:
        ids = submit.params.logprob_token_ids
        found = [probabilities[index % len(probabilities)] for index in range(len(ids))]
        scores = TokenLogprobs(-1.0, 1, ids, tuple(map(math.log, found)), max(0.0, 1 - sum(found)))
        update = RequestUpdate(submit.request_id, (65,), "length", logprobs=(scores,), num_cached=3)
        return [Updates([update], running=0, waiting=0)]

    return script


def post(
    path: str,
    body: dict[str, Any],
    script: Script | None = None,
    config: ServerConfig | None = None,
) -> tuple[httpx.Response, list[Submit], dict[str, float]]:
    async def act(stage: Stage) -> tuple[httpx.Response, list[Submit], dict[str, float]]:
        async with stage.http() as http:
            answer = await http.post(path, json=body)
        return answer, stage.link.submitted, stage.ends()

    return on_stage(script or reads(0.4, 0.1), act, config, chats=True)


def decide(
    *questions: dict[str, Any], given: Any = "state", **fields: Any
) -> tuple[httpx.Response, list[Submit], dict[str, float]]:
    script = fields.pop("script", None)
    config = fields.pop("config", None)
    body = {"model": "m", "input": given, "questions": list(questions), **fields}
    return post("/v1/decisions", body, script, config)


def system(questions: Any = SYSTEM, state: Any = "state", **fields: Any) -> Any:
    script = fields.pop("script", None)
    body = {"model": "m", "state": state, "questions": questions, **fields}
    return post("/v1/systemone", body, script)


def prompt_of(submit: Submit) -> str:
    return bytes(submit.prompt_ids).decode()


@pytest.mark.conforms(
    "POST /v1/decisions", "decisions.model", "decisions.input", "decisions.questions"
)
def test_the_form_of_openai() -> None:
    answer, submitted, ends = decide(PREDICATE, CHOICE, SCORE)
    body = answer.json()
    assert (body["model"], body["object"]) == ("m", "decision")
    predicate, choice, score = body["answers"]
    assert predicate == {
        "type": "predicate",
        "name": None,
        "probability": pytest.approx(0.2),
        "x_label_mass": pytest.approx(0.5),
        "x_labels": "single",
    }
    assert (choice["name"], choice["choice"]) == ("team", "true")
    assert [each["value"] for each in choice["probabilities"]] == ["true", True]
    assert choice["confidence"] == pytest.approx(0.8 * 0.5)
    assert score["score"] == pytest.approx(0.2)
    assert [each["label"] for each in score["probabilities"]] == ["low", "high"]
    assert [each["value"] for each in score["probabilities"]] == [0, 1]
    assert ends == {"stop": 3}
    prompts = list(map(prompt_of, submitted))
    assert prompts[1] == (
        'user: state\n\nQuestion: Team?\nA: "true" - a text\nB: true\nAnswer with the letter of one option only.'
        "\nassistant:"
    )
    assert "A: false\nB: true\n" in prompts[0]
    shared = len("user: state\n\n")
    tokens = shared + sum(len(prompt) - shared for prompt in prompts)
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (tokens, 3)
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    for submit in submitted:
        assert submit.params.shared_tokens == shared
        assert (submit.params.max_tokens, submit.params.temperature) == (1, 0)


def test_messages_calls_and_their_outputs_are_the_conversation_before_the_state() -> None:
    items = [
        {"role": "developer", "content": "be strict"},
        {"role": "user", "content": "one"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_json", "data": {"a": [1]}}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    ]
    _, (submit,), _ = decide(PREDICATE, given=items)
    text = prompt_of(submit).partition("Question:")[0]
    assert 'system: be strict\nuser: one\n\n{"a":[1]}\nassistant: ' in text
    assert text.endswith("tool: done\nassistant: so\nuser: ")
    _, (submit,), _ = decide(PREDICATE, given=[*items, {"role": "user", "content": "now"}])
    assert prompt_of(submit).partition("Question:")[0].endswith("user: now\n\n")


@pytest.mark.conforms("decisions.return_prompt_token_ids", "decisions.temperature")
def test_the_form_of_sglang() -> None:
    answer, submitted, _ = decide(
        *NAMED, given={"a": [1]}, temperature=0.5, return_prompt_token_ids=True
    )
    body = answer.json()
    assert body["object"] == "decisions"
    assert list(body["answers"]) == ["c", "s", "b"]
    choice = body["answers"]["c"]
    assert choice["choice"] == "x"
    assert choice["probabilities"] == {"x": pytest.approx(16 / 17), "y": pytest.approx(1 / 17)}
    assert choice["label_mass"] == pytest.approx(0.5), "the temperature does not change it"
    assert choice["prompt_token_ids"] == submitted[0].prompt_ids
    assert choice["label_token_ids"] == [65, 66]
    assert body["answers"]["s"]["score"] == pytest.approx(1 / 17)
    assert "confidence" not in choice
    assert prompt_of(submitted[0]).startswith('user: {"a":[1]}\n\nQuestion: Team?\nA: x\nB: y\n')
    assert "Is the following true? Urgent?\nyes: now\nAnswer with yes" in prompt_of(submitted[-1])


@pytest.mark.conforms("decisions.order", "decisions.chat_template_kwargs")
def test_the_order_is_averaged() -> None:
    answer, submitted, _ = decide(CHOICE, order="averaged", chat_template_kwargs={"tone": "x"})
    (one,) = answer.json()["answers"]
    assert len(submitted) == 2
    assert [each["probability"] for each in one["probabilities"]] == pytest.approx([0.5, 0.5])
    assert one["x_flips"] == 1
    assert 'A: true\nB: "true" - a text' in prompt_of(submitted[1])


@pytest.mark.conforms(
    "decisions.user",
    "decisions.priority",
    "decisions.request_id",
    "decisions.cache_salt",
    "decisions.without effect",
)
def test_the_place_in_the_queue_and_the_ids() -> None:
    config = ServerConfig(EngineConfig(model="m", scheduling_policy="priority"))
    fields = {"user": "u", "priority": -3, "timeout": 9, "request_id": "mine", "cache_salt": "s"}
    more = {"prompt_cache_key": "k", "safety_identifier": "x", "prompt_format_version": 1}
    answer, (submit,), _ = decide(PREDICATE, config=config, **fields, **more)
    assert submit.urgency == Urgency(-3, "u", 9)
    assert submit.params.cache_salt.startswith("s")
    assert answer.json()["id"] == "decision-mine"
    assert answer.headers["x-orca-ignored-fields"] == "prompt_cache_key, safety_identifier"


@pytest.mark.conforms("decisions.timeout", "decisions.queue_timeout")
def test_failures_and_deadlines_end_all_reads() -> None:
    def failing(submit: Submit) -> list[Updates | Rejected]:
        return [Updates([RequestUpdate(submit.request_id, (), "error", error=NOT_FINITE)], 0, 0)]

    answer, _, ends = decide(PREDICATE, script=failing)
    assert answer.status_code == 500 and ends == {"error": 1}
    answer, _, _ = decide(
        PREDICATE, script=lambda submit: [Rejected(submit.request_id, "long", "prompt")]
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    answer, _, ends = decide(PREDICATE, CHOICE, SCORE, script=lambda submit: [], timeout=0.05)
    assert answer.status_code == 408 and ends == {"timeout": 3}
    answer, _, _ = decide(PREDICATE, script=lambda submit: [], queue_timeout=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")


def test_a_hang_up_aborts_all_reads() -> None:
    async def act(stage: Stage) -> list[str]:
        body = {"model": "m", "input": "x", "questions": [PREDICATE, CHOICE]}
        async with stage.http() as http:
            call = asyncio.create_task(http.post("/v1/decisions", json=body))
            while len(stage.link.submitted) < 2:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return stage.link.aborted

    assert len(on_stage(lambda submit: [], act, chats=True)) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "rank", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{**PREDICATE, "yes": "x"}]}, "questions[0].yes"),
        ({"questions": [PREDICATE, NAMED[0]]}, "questions[1].id"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": ["a", "a"]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": ["a"] * 256}]}, "questions[0].choices"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {}]}]},
            "questions[0].choices[1].value",
        ),
        ({"questions": [{**SCORE, "levels": None}]}, "questions[0].levels"),
        ({"questions": [NAMED[0], NAMED[0]]}, "questions"),
        ({"questions": [{**NAMED[0], "id": " "}]}, "questions[0].id"),
        ({"questions": [{**NAMED[0], "question": None}]}, "questions[0].question"),
        (
            {"questions": [{**NAMED[0], "options": [{"name": "A"}, {"name": "a"}]}]},
            "questions[0].options",
        ),
        ({"questions": [{**NAMED[0], "instructions": "x"}]}, "questions[0].instructions"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": "x" * 2000}, "input"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"order": "best"}, "order"),
        ({"temperature": 0}, "temperature"),
        ({"images": ["x"]}, "images"),
        ({"joint": True}, "joint"),
        ({"stream": True}, "stream"),
        ({"prompt_format_version": 2}, "prompt_format_version"),
        ({"priority": 1}, "priority"),
        ({"made_up": 1}, "made_up"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"model": "m", "input": "state", "questions": [PREDICATE], **fields}
    answer, submitted, _ = post("/v1/decisions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not submitted


def test_a_model_without_a_chat_template_is_refused() -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            return await http.post(
                "/v1/decisions", json={"model": "m", "input": "x", "questions": [PREDICATE]}
            )

    answer = on_stage(reads(0.4, 0.1), act)
    assert answer.json()["error"]["code"] == "no_chat_template"


@pytest.mark.conforms(
    "POST /v1/systemone", "systemone.model", "systemone.state", "systemone.questions"
)
@pytest.mark.parametrize("model", [None, "jev-latest", "m"])
def test_the_form_of_typesafe(model: str | None) -> None:
    answer, submitted, _ = system(state=["a", {"b": 1}], model=model, made_up=1)
    body = answer.json()
    assert body["model"] == "m"
    noul, choice, score = (body["answers"][name] for name in "ncs")
    assert noul["type"] == "noul" and 0 <= noul["noul"] <= 1
    assert choice["choice"] == "x"
    assert choice["probabilities"] == {"x": pytest.approx(0.8), "y": pytest.approx(0.2)}
    assert choice["confidence"] == pytest.approx(0.6)
    assert score["legend"] == {"0": "low", "1": "high", "2": "worst"}
    assert score["score"] == pytest.approx(
        sum(int(i) * p for i, p in score["probabilities"].items())
    )
    assert body["usage"]["output_tokens"] == 0
    assert answer.headers["x-orca-ignored-fields"] == "made_up"
    assert prompt_of(submitted[0]).startswith(
        'user: ["a",{"b":1}]\n\nQuestion: Is the following true? Urgent?\nyes: now'
    )
    assert 'Question: {"q":1}\nA: x\nB: y - ["d"]\n' in prompt_of(submitted[-2])


@pytest.mark.conforms(
    "systemone.instructions",
    "systemone.order",
    "systemone.temperature",
    "systemone.chat_template_kwargs",
    "systemone.cache_salt",
    "systemone.priority",
    "systemone.user",
    "systemone.request_id",
    "systemone.queue_timeout",
    "systemone.timeout",
)
def test_more_fields_of_the_form_of_typesafe() -> None:
    fields = {"user": "u", "request_id": "r", "cache_salt": "s", "timeout": 9, "queue_timeout": 8}
    more = {
        "order": "averaged",
        "temperature": 0.5,
        "priority": 0,
        "chat_template_kwargs": {"a": 1},
    }
    answer, submitted, _ = system({"c": SYSTEM["c"]}, instructions="be strict", **fields, **more)
    one = answer.json()["answers"]["c"]
    assert one["x_flips"] == 1 and len(submitted) == 2
    assert prompt_of(submitted[0]).startswith("system: be strict\nuser: state")
    assert (submitted[0].urgency.tenant, submitted[0].urgency.deadline) == ("u", 9)


@pytest.mark.conforms("systemone.without effect")
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"questions": {}}, ["questions"]),
        ({"questions": {"q": {"instructions": "x"}}}, ["questions", "type"]),
        ({"questions": {"q": {"type": "boolean"}}}, ["questions", "type"]),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, ["questions", "q", "criteria"]),
        (
            {"questions": {"q": {"type": "score", "criteria": {"0": "a"}}}},
            ["questions", "q", "criteria"],
        ),
        (
            {"questions": {"q": {"type": "score", "criteria": ["a", None]}}},
            ["questions", "q", "criteria"],
        ),
        (
            {"questions": {"q": {"type": "noul", "criteria": {"x": "a"}}}},
            ["questions", "q", "criteria"],
        ),
        ({"state": "x" * 2000}, ["state"]),
        ({"images": ["x"]}, ["images"]),
    ],
)
def test_a_wrong_field_of_typesafe_has_its_place(fields: dict[str, Any], place: list[str]) -> None:
    body = {"model": "m", "state": "state", "questions": SYSTEM, **fields}
    answer, submitted, _ = post("/v1/systemone", body)
    (fault,) = answer.json()["detail"]
    assert (answer.status_code, fault["loc"]) == (422, ["body", *place])
    assert fault["msg"] and not submitted


def test_other_errors_of_typesafe_have_a_type() -> None:
    answer, _, _ = system(model="other")
    assert answer.status_code == 404
    assert answer.json()["detail"]["error_type"] == "invalid_request"
    answer, _, _ = system(script=lambda submit: [], timeout=0.05)
    assert answer.status_code == 408


def test_a_compressed_body_is_read_or_refused_by_name() -> None:
    async def act(stage: Stage) -> httpx.Response:
        headers = {"content-encoding": "zstd", "content-type": "application/json"}
        async with stage.http() as http:
            return await http.post("/v1/systemone", content=b"not compressed", headers=headers)

    answer = on_stage(reads(0.4, 0.1), act, chats=True)
    assert answer.status_code in (415, 422)
    assert "zstd" in answer.text


def test_the_labels_are_listed(idle_server: Server) -> None:
    found = httpx.get(f"{idle_server.url}/v1/models").json()
    assert found["data"][0]["decision_labels"] == {"words": 0, "letters": 26, "digits": 10}
    assert found["models"][0]["name"] == MODEL


def test_the_server_and_llm_decide_alike(idle_server: Server) -> None:
    body = {
        "state": "a state",
        "questions": {"c": SYSTEM["c"], "n": {"type": "noul", "instructions": "x"}},
    }
    answers = httpx.post(f"{idle_server.url}/v1/systemone", json=body).json()["answers"]
    questions = [
        Question.choice('{"q":1}', {"x": None, "y": '["d"]'}),
        Question.yes_no("x"),
    ]
    with LLM("preset:toy", max_model_len=1024) as llm:
        choice, noul = llm.decide("a state", questions)
    assert tuple(answers["c"]["probabilities"].values()) == choice.probabilities
    assert answers["n"]["noul"] == noul.yes
    text = httpx.get(f"{idle_server.url}/metrics").text
    assert "decisions_total{" in text and 'type="choice"' in text
