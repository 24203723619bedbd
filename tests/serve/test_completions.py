"""`/v1/completions` through OpenAI's own client and through plain HTTP, against the toy model's oracle."""

import shlex
import subprocess
from typing import Any

import openai
import pytest

from orca_jax.request import SamplingParams
from orca_jax.sim.toy import toy_generate
from orca_jax.text.tokenizer import ByteTokenizer
from tests.serve.running import EOS, MODEL, VOCAB_SIZE, Server, running

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def oracle(prompt: str | list[int], max_tokens: int = 16, ignore_eos: bool = False, **fields: Any) -> tuple[str, int]:
    """(text, generated tokens) of the toy model; greedy unless told."""
    params = SamplingParams(max_tokens, **{"temperature": 0, "ignore_eos": ignore_eos, **fields})
    prompt_ids = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    ids = toy_generate(prompt_ids, params, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    ends = (not ignore_eos and ids[-1] == EOS) or ids[-1] in params.stop_token_ids
    return ByteTokenizer().decode(ids[:-1] if ends else ids), len(ids)


def test_openai_client(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0)
    text, count = oracle("hello", 20)
    assert answer.choices[0].text == text
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5,
        "completion_tokens": count,
        "total_tokens": 5 + count,
    }
    assert str(answer._request_id).startswith("req_")
    assert [model.id for model in client.models.list()] == [MODEL]


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
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in pieces)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == count
    assert len(pieces) > 100, "it came in large lumps"


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no-such-model", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", presence_penalty=1.5)
    assert (bad.value.param, bad.value.type) == ("presence_penalty", "invalid_request_error")


def test_defaults_and_raw_shapes(server: Server) -> None:
    body = server.complete("defaults", seed=5).json()
    text, count = oracle("defaults", temperature=1.0, seed=5)
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    reason = "length" if count == 16 else "stop"
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
    with server.stream("defaults", seed=5) as events:
        chunks = list(events)
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    assert all(set(c) == {"index", "text", "logprobs", "finish_reason"} for e in chunks for c in e["choices"])


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
    with server.stream(prompts, max_tokens=40, ignore_eos=True, stream_options=options, **GREEDY) as events:
        *chunks, last = events
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert ends[choice["index"]] is None, "text after its end"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [oracle(prompt, 40, ignore_eos=True)[0] for prompt in prompts]
    assert ends == ["length"] * 3
    assert last["usage"] == {"prompt_tokens": 14, "completion_tokens": 120, "total_tokens": 134}


def test_ends(server: Server) -> None:
    """By the model's end token, by a stop id and by a length, each with its own text and count."""
    seed = next(n for n in range(1000) if oracle("end", 200, temperature=1.0, seed=n)[1] < 200)
    text, count = oracle("end", 200, temperature=1.0, seed=seed)
    answer = server.complete("end", max_tokens=200, seed=seed).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == count
    stop_id = toy_generate(list(b"hello"), SamplingParams(8, temperature=0), vocab_size=VOCAB_SIZE)[5]
    answer = server.complete("hello", stop_token_ids=[stop_id], max_tokens=50, **GREEDY).json()
    text, count = oracle("hello", 50, stop_token_ids=(stop_id,))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == count <= 6


def test_stop_strings_across_tokens(idle_server: Server) -> None:
    whole, _ = oracle("stop here", 400, ignore_eos=True)
    at = next(i for i in range(30, 400) if whole[i : i + 3].isascii() and whole.find(whole[i : i + 3]) == i)
    stop = whole[at : at + 3]
    fields = {"max_tokens": 8000, "ignore_eos": True, "stop": ["never seen", stop], **GREEDY}
    answer = idle_server.complete("stop here", **fields).json()
    assert answer["choices"][0] == {"index": 0, "text": whole[:at], "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] < 400
    with idle_server.stream("stop here", **fields) as events:
        pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole[:at]
    assert pieces[-1]["finish_reason"] == "stop"


def test_neutral_values_are_taken(server: Server) -> None:
    neutral: dict[str, Any] = {"n": 1, "best_of": None, "echo": False, "presence_penalty": 0.0, "logit_bias": {}}
    nulls = dict.fromkeys(("logprobs", "suffix", "max_tokens", "top_p", "stop", "seed", "stream", "stream_options"))
    answer = server.complete("x", **neutral, **nulls, user="me")
    assert answer.status_code == 200, answer.text


def test_curl_line_works(server: Server) -> None:
    assert server.url in server.lines[0]
    done = subprocess.run(shlex.split(server.lines[1]), capture_output=True, text=True, timeout=20)
    assert done.stdout.endswith("data: [DONE]\n\n") and '"finish_reason":"' in done.stdout


def test_curl_line_survives_odd_names_and_hosts() -> None:
    with running("--host", "::", "--served-model-name", "it's $odd", "second") as server:
        assert "http://[::1]:" in server.lines[1]
        done = subprocess.run(shlex.split(server.lines[1]), capture_output=True, text=True, timeout=20)
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["it's $odd", "second"]
        answer = server.http.post("/v1/completions", json={"model": "second", "prompt": "x"}).json()
        assert answer["model"] == "it's $odd"
