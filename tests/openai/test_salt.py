"""Who shares computed prefixes with whom, over HTTP: `--cache-salt-per-key`."""

from pathlib import Path

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.serve.played import Stage, on_stage, saying, user
from tests.serve.running import running

KEYS = ("sk-first-of-two", "sk-second-of-two")
PROMPT = "p" * 40  # two full pages of 16


def salts_of(
    config: ServerConfig, *asked: tuple[str, str | None], path: str = "/v1/completions"
) -> list[str]:
    """The salts that reach the engine, for calls of (key, cache_salt)."""
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [user("x")]}

    async def act(stage: Stage) -> list[str]:
        async with stage.http() as http:
            for key, salt in asked:
                headers = {"authorization": f"Bearer {key}"}
                body = {"model": "m", "cache_salt": salt, **prompt}
                assert (await http.post(path, json=body, headers=headers)).status_code == 200
        return [submit.params.cache_salt for submit in stage.link.submitted]

    return on_stage(saying("x"), act, config, chats="chat" in path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_salts_differ_by_key_and_by_the_calls_own(path: str) -> None:
    asked = [(key, salt) for key in KEYS for salt in (None, "s", "t")]
    config = ServerConfig(EngineConfig(model="m"), api_key=KEYS, cache_salt_per_key=True)
    salts = salts_of(config, *asked, *asked, path=path)
    assert salts[:6] == salts[6:] and len(set(salts)) == 6
    assert not any(key in salt for key in KEYS for salt in salts)
    shared = ServerConfig(EngineConfig(model="m"), api_key=KEYS, cache_salt_per_key=False)
    assert salts_of(shared, *asked, path=path) == ["", "s", "t"] * 2


def test_salts_by_key_are_the_default_with_more_than_one_key(tmp_path: Path) -> None:
    """Hits end inside a page, so a key could read the prompt of another one from `cached_tokens`, token by token."""
    file = tmp_path / "keys"
    file.write_text(KEYS[1])
    file.chmod(0o600)
    engine = EngineConfig(model="m")
    for config in (
        ServerConfig(engine, api_key=KEYS),
        ServerConfig(engine, api_key=KEYS[:1], api_key_file=str(file)),
    ):
        salts = salts_of(config, (KEYS[0], None), (KEYS[1], None))
        assert len(set(salts)) == 2 and "" not in salts
    assert salts_of(ServerConfig(engine, api_key=KEYS[:1]), (KEYS[0], None)) == [""]


def test_nobody_passes_for_another_key() -> None:
    """A caller who knew the salt of another key still gets one that begins with its own."""
    config = ServerConfig(EngineConfig(model="m"), api_key=KEYS, cache_salt_per_key=True)
    (own,) = salts_of(config, (KEYS[0], None))
    assert own not in salts_of(config, (KEYS[1], own), (KEYS[1], None))


def test_keys_share_no_pages(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = ("--scheduler", "chunked", "--api-key", *KEYS, "--trace-file", str(trace))
    with running(*flags, "--log-requests", "--log-format", "json", api_key=KEYS[0]) as server:

        def cached(key: str, **fields: str) -> int:
            body = {"model": "preset:toy", "prompt": PROMPT, "max_tokens": 1, **fields}
            answer = server.http.post(
                "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            details = answer.json()["usage"].get("prompt_tokens_details")
            return 0 if details is None else int(details["cached_tokens"])

        assert [cached(KEYS[0]), cached(KEYS[0])] == [0, 39]
        assert [cached(KEYS[1]), cached(KEYS[1])] == [0, 39], "another key's pages were found"
        assert [cached(KEYS[1], cache_salt="s"), cached(KEYS[1], cache_salt="s")] == [0, 39]
    told = "\n".join([*server.lines, *server.errors, trace.read_text()])
    assert "request ended" in told and not any(key in told for key in KEYS)
