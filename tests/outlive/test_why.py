"""Explanations of prompts that were computed again: where they differ, what was given up, and whose they are."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_jax.cli.main import main
from orca_jax.sched.prefixes.lost import LostPages
from orca_jax.serve.openai.explain import MOST_PROMPTS, MOST_TOKENS, Seen, SeenPrompts
from orca_jax.values.request import RequestUpdate
from tests.chaos.world import metrics
from tests.serve.running import MODEL, Server, running

KIND = "You are kind. " * 10
GROUP = (None, "", None)
SMALL = ("--page-size", "16", "--num-pages", "40", "--max-num-seqs", "2", "--max-model-len", "512")


def seen(name: str, ids: list[int], parts: Any = (("messages[0]", b"a"),)) -> Seen:
    return Seen(name, array("I", ids), parts, frozenset({f"r-{name}"}), str)


def added(prompts: SeenPrompts, group: Any, one: Seen) -> Seen:
    prompts.add_prompt(group, one)
    return one


def test_the_most_similar_prompt_is_found() -> None:
    """Of equally similar ones the last; its first other token, and the first part of the call that differs."""
    moments = iter(range(9))
    prompts = SeenPrompts(clock=lambda: float(next(moments)))
    assert added(prompts, GROUP, seen("a", [1, 2, 3, 4])).earlier is None
    added(prompts, GROUP, seen("b", [1, 2, 3, 5], (("system", b"x"), ("messages[1]", b"y"))))
    found = added(prompts, GROUP, seen("c", [1, 2, 3, 6, 7], (("system", b"x"),)))
    assert (found.earlier, found.shared, found.ago) == ("b", 3, 1.0)
    assert (found.part, found.tokens) == ("messages[1]", ("6", "5"))
    longer = added(prompts, GROUP, seen("d", [1, 2, 3, 6, 7, 8]))
    assert (longer.earlier, longer.shared, longer.tokens) == ("c", 5, ("8", None))
    again = added(prompts, GROUP, seen("e", [1, 2, 3, 4]))
    assert (again.earlier, again.shared, again.part) == ("a", 4, None)


@pytest.mark.parametrize("length", range(1, 40))
def test_shared_tokens_are_counted(length: int) -> None:
    for shared in range(length + 1):
        prompts = SeenPrompts()
        prompts.add_prompt(GROUP, seen("a", [7] * length))
        found = added(prompts, GROUP, seen("b", [7] * shared + [8] * 3))
        assert found.shared == shared and (found.earlier is None) == (shared == 0)


def test_groups_know_nothing_of_one_another() -> None:
    prompts = SeenPrompts()
    groups = [("key", "", None), ("other", "", None), ("key", "salt", None), ("key", "", "adapter")]
    for index, group in enumerate(groups):
        found = added(prompts, group, seen(str(index), [1, 2, 3]))
        assert found.earlier is None
        found.take_update(RequestUpdate("r", (1,), num_cached=0))
    assert [each.id for each in prompts.of_key("key")] == ["3", "2", "0"]
    assert prompts.of_key(None) == []


def test_memory_is_bounded() -> None:
    prompts = SeenPrompts()
    for index in range(MOST_PROMPTS + 5):
        prompts.add_prompt(GROUP, seen(str(index), [index + 1]))
    assert len(prompts._groups[GROUP]) == MOST_PROMPTS
    long = [5] * (MOST_TOKENS // 4)
    for index in range(6):
        prompts.add_prompt((f"key {index}", "", None), seen(f"long {index}", long))
    assert prompts._num_tokens <= MOST_TOKENS and GROUP not in prompts._groups


def test_a_page_that_was_given_up_names_the_call_only_within_its_group() -> None:
    prompts = SeenPrompts()
    prompts.add_prompt(GROUP, seen("a", [1] * 40))
    prompts.add_prompt(GROUP, seen("big", [2] * 40))
    for cause, expected in (("r-big", "for big"), ("r-of another key", "for another call")):
        found = added(prompts, GROUP, seen("b", [1] * 40))
        found.take_update(RequestUpdate("r", (1,), num_cached=16, lost=(3.0, cause)))
        found.take_update(RequestUpdate("r", (1,)))
        explained = found.explanation()
        assert (explained.cached_tokens, explained.lost_tokens) == (16, 23)
        assert f"the cache gave them up 3 s before, {expected}" in explained.reason


def test_lost_pages_are_few_and_dated() -> None:
    now = [0.0]
    lost = LostPages(clock=lambda: now[0])
    lost.cause = "r1"
    lost.add_page(b"a")
    now[0] = 4.0
    assert lost.first([b"x", b"a"]) == (4.0, "r1") and lost.first([b"x"]) is None


@pytest.fixture(scope="module")
def explaining() -> Iterator[Server]:
    with running("--explain-cache", *SMALL) as server:
        yield server


def chat(server: Server, system: str, user: str, path: str = "/v1/chat/completions") -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0}
    if path == "/v1/responses":
        body = {"model": MODEL, "instructions": system, "input": user, "max_output_tokens": 3}
    if path == "/v1/messages":
        body |= {"system": system, "messages": messages[1:]}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["cache_explanation"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_usage_names_the_field_that_differs(path: str, explaining: Server) -> None:
    kind = f"{path} {KIND}"
    chat(explaining, kind, "Hello there")
    found = chat(explaining, kind, "Hello you", path)
    assert (found["token"], found["earlier_token"]) == ("y", "t")
    assert found["field"] in ("messages[0]", "messages[1]", "input", "input[0]", "input[1]"), found
    assert found["cached_tokens"] >= 128
    found = chat(explaining, kind.replace("kind", "mild"), "Hello you", path)
    assert (found["field"], found["token"], found["earlier_token"]) == ("system", "m", "k")


@pytest.mark.conforms("GET /v1/cache_explanations")
def test_what_was_given_up_is_named(explaining: Server, capsys: pytest.CaptureFixture[str]) -> None:
    chat(explaining, "Given up. " * 10, "Hello")
    others = [explaining.complete(str(index) * 300, max_tokens=2).json() for index in range(6)]
    found = chat(explaining, "Given up. " * 10, "Hello")
    assert found["lost_tokens"] > 100 and found["cached_tokens"] == 0
    named = [each["id"] for each in others if found["reason"].endswith(f"for {each['id']}")]
    assert len(named) == 1
    assert main(["why", found["id"], "--base-url", explaining.url]) == 0
    assert found["reason"] in capsys.readouterr().out
    assert main(["why", "--json", "--base-url", explaining.url]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == found
    assert main(["why", "cmpl-x", "--base-url", explaining.url]) == 1
    assert "remembers no prompt of cmpl-x" in capsys.readouterr().out
    assert metrics(explaining)["num_requests_running"] == 0


def test_a_server_without_explanations_says_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cache_explanation" not in server.complete("abc", max_tokens=2).json()["usage"]
    assert main(["why", "--base-url", server.url]) == 2
    assert "--explain-cache" in capsys.readouterr().err


@pytest.mark.slow
def test_keys_learn_nothing_of_each_other(tmp_path: Path) -> None:
    """Also if they share the pages of one cache."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    flags = ("--explain-cache", "--no-cache-salt-per-key", "--api-key-file", str(keys))
    with running(*flags, api_key="one") as server:
        chat(server, KIND, "Hello")
        server.http.headers["authorization"] = "Bearer two"
        found = chat(server, KIND, "Hello")
        assert found["cached_tokens"] > 100 and "earlier" not in found
        assert len(server.http.get("/v1/cache_explanations").json()["data"]) == 1
