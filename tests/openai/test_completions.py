"""`/v1/completions` through OpenAI's own client and through plain HTTP, against the toy model's oracle."""

import shlex
import subprocess
from typing import Any

import openai
import pytest

from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.request import SamplingParams
from tests.openai.shapes import check_response
from tests.serve.played import call, saying
from tests.serve.running import EOS, MODEL, VOCAB_SIZE, Server, running
from tests.sim.oracle import toy_generate

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def oracle(
    prompt: str | list[int], max_tokens: int = 16, ignore_eos: bool = False, **fields: Any
) -> tuple[str, int]:
    """(text, generated tokens) of the toy model; greedy unless told."""
    params = SamplingParams(max_tokens, **{"temperature": 0, "ignore_eos": ignore_eos, **fields})
    prompt_ids = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    ids = toy_generate(prompt_ids, params, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    ends = (not ignore_eos and ids[-1] == EOS) or ids[-1] in params.stop_token_ids
    return ByteTokenizer().decode(ids[:-1] if ends else ids), len(ids)


@pytest.mark.conforms(
    "POST /v1/completions", "completions.model", "completions.prompt", "GET /v1/models"
)
@pytest.mark.conforms("completions.max_tokens", "completions.temperature")
def test_openai_client(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0)
    text, count = oracle("hello", 20)
    assert answer.choices[0].text == text
    assert (
        answer.object == "text_completion"
        and answer.id.startswith("cmpl-")
        and answer.model == MODEL
    )
    assert answer.usage is not None
    usage = answer.usage.model_dump(exclude_none=True)
    usage.pop("prompt_tokens_details", None)
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": count,
        "total_tokens": 5 + count,
    }
    assert str(answer._request_id).startswith("req_")
    assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.conforms("completions.stream", "completions.stream_options", "completions.ignore_eos")
def test_openai_client_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="stream me",
            max_tokens=300,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text, count = oracle("stream me", 300, ignore_eos=True)
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == text
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + [
        "length"
    ]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in pieces)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == count
    assert len(pieces) > 100, "it came in large lumps"


@pytest.mark.conforms("completions.model")
def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no-such-model", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", presence_penalty=2.5)
    assert (bad.value.param, bad.value.type) == ("presence_penalty", "invalid_request_error")


def test_defaults_and_raw_shapes(server: Server) -> None:
    body = server.complete("defaults", seed=5).json()
    text, count = oracle("defaults", temperature=1.0, seed=5)
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    reason = "length" if count == 16 else "stop"
    assert body["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    ]
    with server.stream("defaults", seed=5) as events:
        chunks = list(events)
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    assert all(
        set(c) == {"index", "text", "logprobs", "finish_reason"}
        for e in chunks
        for c in e["choices"]
    )


@pytest.mark.conforms("completions.prompt")
def test_every_kind_of_prompt(server: Server) -> None:
    for prompt in ("one", list(b"one"), [list(b"one"), [7]], ["one", "two", "three"], [[1]]):
        choices = server.complete(prompt, **GREEDY).json()["choices"]
        each = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        assert [choice["index"] for choice in choices] == list(range(len(each)))
        assert [choice["text"] for choice in choices] == [oracle(one)[0] for one in each]


def test_several_prompts_in_one_stream(server: Server) -> None:
    prompts = ["alpha", "beta", "gamma"]
    texts, ends = ["", "", ""], [None, None, None]
    options = {"include_usage": True}
    with server.stream(
        prompts, max_tokens=40, ignore_eos=True, stream_options=options, **GREEDY
    ) as events:
        *chunks, last = events
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert ends[choice["index"]] is None, "text after its end"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [oracle(prompt, 40, ignore_eos=True)[0] for prompt in prompts]
    assert ends == ["length"] * 3
    last["usage"].pop("prompt_tokens_details")
    assert last["usage"] == {"prompt_tokens": 14, "completion_tokens": 120, "total_tokens": 134}


@pytest.mark.conforms("completions.stop_token_ids")
def test_ends(server: Server) -> None:
    """By the model's end token, by a stop id and by a length, each with its own text and count."""
    seed = next(n for n in range(1000) if oracle("end", 200, temperature=1.0, seed=n)[1] < 200)
    text, count = oracle("end", 200, temperature=1.0, seed=seed)
    answer = server.complete("end", max_tokens=200, seed=seed).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == count
    stop_id = toy_generate(list(b"hello"), SamplingParams(8, temperature=0), vocab_size=VOCAB_SIZE)[
        5
    ]
    answer = server.complete("hello", stop_token_ids=[stop_id], max_tokens=50, **GREEDY).json()
    text, count = oracle("hello", 50, stop_token_ids=(stop_id,))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == count <= 6


@pytest.mark.conforms("completions.stop")
def test_stop_strings_across_tokens(idle_server: Server) -> None:
    whole, _ = oracle("stop here", 400, ignore_eos=True)
    at = next(
        i
        for i in range(30, 400)
        if whole[i : i + 3].isascii() and whole.find(whole[i : i + 3]) == i
    )
    stop = whole[at : at + 3]
    fields = {"max_tokens": 8000, "ignore_eos": True, "stop": ["never seen", stop], **GREEDY}
    answer = idle_server.complete("stop here", **fields).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": whole[:at],
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] < 400
    with idle_server.stream("stop here", **fields) as events:
        pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole[:at]
    assert pieces[-1]["finish_reason"] == "stop"


@pytest.mark.conforms("completions.without effect")
def test_neutral_values_are_taken(server: Server) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": None,
        "echo": False,
        "presence_penalty": 0.0,
        "logit_bias": {},
    }
    neutral |= {
        "suffix": "",
        "priority": 0,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "cache_salt": "x",
    }
    nulls = dict.fromkeys(
        ("logprobs", "max_tokens", "top_p", "stop", "seed", "stream", "stream_options")
    )
    answer = server.complete("x", **neutral, **nulls, user="me")
    assert answer.status_code == 200, answer.text


@pytest.mark.conforms("completions.n", "completions.seed")
def test_choices_draw_with_their_own_seeds(server: Server) -> None:
    answer = server.complete(["one", "two"], n=3, seed=7, max_tokens=10, ignore_eos=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    expected = [
        oracle(prompt, 10, ignore_eos=True, temperature=1.0, seed=7 + i)[0]
        for prompt in ("one", "two")
        for i in range(3)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected and len(set(expected)) == 6
    usage = answer["usage"]
    cached = usage.pop("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
    assert cached in (0, 4), (
        "all but the last token of both, if another test has asked for them before"
    )
    assert usage == {"prompt_tokens": 6, "completion_tokens": 60, "total_tokens": 66}, (
        "prompts count once"
    )
    last = server.complete("x", n=2, seed=2**63 - 1, max_tokens=2)
    assert last.status_code == 200, "seeds wrap"


@pytest.mark.conforms("completions.best_of", "completions.n")
def test_best_of(server: Server) -> None:
    fields = {"seed": 3, "max_tokens": 8, "ignore_eos": True}
    every = server.complete("rank", n=6, logprobs=0, **fields).json()["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in every]
    best = sorted(range(6), key=lambda i: -means[i])[:2]
    answer = server.complete("rank", n=2, best_of=6, **fields).json()
    assert [choice["text"] for choice in answer["choices"]] == [every[i]["text"] for i in best]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 48, (
        "candidates that were not taken were generated too"
    )


@pytest.mark.conforms("completions.logprobs")
def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=12, temperature=0, logprobs=3
    )
    text, count = oracle("hello", 12)
    logprobs = answer.choices[0].logprobs
    assert (
        logprobs is not None
        and logprobs.token_logprobs is not None
        and logprobs.top_logprobs is not None
    )
    assert (
        len(logprobs.tokens or ())
        == len(logprobs.token_logprobs)
        == len(logprobs.text_offset or ())
        == count
    )
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)
    for token, logprob, top in zip(
        logprobs.tokens or (), logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()), "greedy takes the most probable one"
    assert answer.choices[0].text == text


def test_offsets_point_into_the_text(server: Server) -> None:
    choice = server.complete(
        "naïve ☃", echo=True, logprobs=0, max_tokens=30, seed=1, ignore_eos=True
    ).json()["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token != "<|end|>":
            assert choice["text"][offset : offset + len(token)] == token
    assert tokens[2:4] == ["bytes:\\xc3", "bytes:\\xaf"], "half a character is told in bytes"


@pytest.mark.conforms("completions.echo", "completions.logprobs", "completions.prompt_logprobs")
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_scoring_a_prompt(server: Server, max_tokens: int) -> None:
    """As lm-eval asks: ids, echo, logprobs; the same numbers whatever is generated after."""
    ids = list(b"score me")
    answer = server.complete(
        ids, echo=True, logprobs=1, max_tokens=max_tokens, ignore_eos=True, **GREEDY
    ).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert (
        choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == max_tokens
    )
    assert (
        choice["text"].startswith("score me") and len(logprobs["tokens"]) == len(ids) + max_tokens
    )
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    reference = server.complete(ids, prompt_logprobs=1, max_tokens=1, **GREEDY).json()["choices"][
        0
    ]["prompt_logprobs"]
    assert reference[0] is None
    scores = [
        entry[str(token)]["logprob"] for entry, token in zip(reference[1:], ids[1:], strict=True)
    ]
    assert scores == logprobs["token_logprobs"][1 : len(ids)]


@pytest.mark.conforms("completions.stream", "completions.echo", "completions.return_token_ids")
def test_streams_have_the_same_details(server: Server) -> None:
    fields = {
        "max_tokens": 20,
        "seed": 5,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    (whole,) = server.complete("detail", **fields).json()["choices"]
    with server.stream("detail", **fields) as stream:
        pieces = [chunk["choices"][0] for chunk in stream]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for piece in pieces for one in piece["logprobs"][name]] == whole["logprobs"][
            name
        ]
    assert [one for piece in pieces for one in piece["token_ids"]] == whole["token_ids"]
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"] == list(b"detail")


@pytest.mark.conforms("completions.include_stop_str_in_output")
def test_stop_strings_may_stay(server: Server) -> None:
    whole, _ = oracle("stop here", 400, ignore_eos=True)
    stop = next(whole[i : i + 2] for i in range(20, 400) if whole[i : i + 2].isascii())
    fields = {"max_tokens": 400, "ignore_eos": True, "stop": stop, **GREEDY}
    cut = server.complete("stop here", **fields).json()["choices"][0]["text"]
    assert (
        server.complete("stop here", include_stop_str_in_output=True, **fields).json()["choices"][
            0
        ]["text"]
        == cut + stop
    )


@pytest.mark.conforms(
    "completions.logit_bias", "completions.allowed_token_ids", "completions.bad_words"
)
def test_biased_allowed_and_forbidden_tokens(server: Server) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "seed": 1}
    answer = server.complete("x", logit_bias={"65": 100}, **fields).json()
    assert answer["choices"][0]["text"] == "A" * 12
    answer = server.complete("x", allowed_token_ids=list(b"abc"), **fields).json()
    assert set(answer["choices"][0]["text"]) <= set("abc")
    free = server.complete("x", allowed_token_ids=list(b"ab"), **fields).json()["choices"][0][
        "text"
    ]
    answer = server.complete("x", allowed_token_ids=list(b"ab"), bad_words=["a"], **fields).json()
    assert "a" in free and answer["choices"][0]["text"] == "b" * 12


@pytest.mark.conforms("completions.min_tokens")
def test_min_tokens_and_end_tokens(server: Server) -> None:
    fields = {"max_tokens": 20, "logit_bias": {str(EOS): 100}, "seed": 1}
    assert server.complete("x", **fields).json()["usage"]["completion_tokens"] == 1
    assert server.complete("x", min_tokens=7, **fields).json()["usage"]["completion_tokens"] == 8
    assert (
        server.complete("x", min_tokens=7, **fields).json()["choices"][0]["finish_reason"] == "stop"
    )


@pytest.mark.conforms("completions.truncate_prompt_tokens")
def test_truncated_prompts(server: Server) -> None:
    answer = server.complete(
        "a long prompt", truncate_prompt_tokens=6, echo=True, return_token_ids=True, **GREEDY
    ).json()
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == list(b"prompt") and answer["usage"]["prompt_tokens"] == 6
    assert choice["text"] == "prompt" + oracle("prompt")[0]
    answer = server.complete(
        "x" * 9000, truncate_prompt_tokens=-1, max_tokens=92, ignore_eos=True
    ).json()
    answer["usage"].pop("prompt_tokens_details", None)
    assert answer["usage"] == {"prompt_tokens": 8100, "completion_tokens": 92, "total_tokens": 8192}


@pytest.mark.conforms("completions.request_id")
def test_names_of_the_caller(server: Server) -> None:
    answer = server.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "x", "request_id": "my-1"},
        headers={"x-request-id": "trace-1"},
    )
    assert answer.json()["id"] == "cmpl-my-1" and answer.headers["x-request-id"] == "trace-1"


@pytest.mark.conforms("completions.structured_outputs")
def test_structured_completions(server: Server) -> None:
    answer = server.complete(
        "x", structured_outputs={"choice": ["left", "right"]}, max_tokens=20, n=4, seed=1
    )
    assert {choice["text"] for choice in answer.json()["choices"]} <= {"left", "right"}


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_prompts_times_candidates_have_a_limit(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr("orca_jax.serve.openai.completions.MAX_ANSWERS", 4)
    answer, link = call(saying("x"), prompt=["a", "b"], **{field: 2})
    assert answer.status_code == 200 and len(link.submitted) == 4
    answer, link = call(saying("x"), prompt=["a", "b", "c"], **{field: 2})
    assert answer.status_code == 400 and not link.submitted
    assert answer.json()["error"]["param"] == field


def test_every_answer_is_in_shape(server: Server) -> None:
    calls: list[dict[str, Any]] = [
        {"n": 2, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"stream": True, "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"best_of": 3, "prompt_logprobs": 1, "return_token_ids": True},
        {"n": 0},
    ]
    for fields in calls:
        answer = server.complete("shape", **fields)
        sent = answer.request.read()
        check_response(
            "POST",
            "/v1/completions",
            sent,
            answer.status_code,
            dict(answer.headers),
            answer.content,
        )


def test_curl_line_works(server: Server) -> None:
    assert server.url in server.lines[0]
    done = subprocess.run(shlex.split(server.lines[1]), capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("data: [DONE]\n\n") and '"finish_reason":"' in done.stdout


def test_curl_line_survives_odd_names_and_hosts() -> None:
    with running("--host", "::", "--served-model-name", "it's $odd", "second") as server:
        assert "http://[::1]:" in server.lines[1]
        done = subprocess.run(
            shlex.split(server.lines[1]), capture_output=True, text=True, timeout=60
        )
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == [
            "it's $odd",
            "second",
        ]
        answer = server.http.post("/v1/completions", json={"model": "second", "prompt": "x"}).json()
        assert answer["model"] == "it's $odd"
