"""`POST /update_weights_from_disk`: its own keys, its folder, and the version in answers."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from orca_jax.link.client import EngineClient
from orca_jax.link.wire import (
    EngineAnswer,
    EngineCall,
    ForgetPrefixes,
    Message,
    Pause,
    ReadWeights,
    ReplaceWeights,
    Resume,
    Sleep,
    Updates,
    WakeUp,
)
from orca_jax.serve.app import create_app
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.serve.played import PlayedLink, Script, Stage, on_stage, saying

PATH = "/update_weights_from_disk"
RESET = "/reset_prefix_cache"
ADMIN = {"authorization": "Bearer admin-key"}
USER = {"authorization": "Bearer user-key"}


class UpdatedLink(PlayedLink):
    """Answers updates as an engine: folders named "bad" are refused, and the version is 5 if none is given."""

    num_resets = 0

    def __init__(self, client: EngineClient, script: Script) -> None:
        super().__init__(client, script)
        self.pauses: list[tuple[str, bool]] = []
        self.sleeps: list[Sleep | WakeUp] = []

    def send(self, message: Message) -> None:
        super().send(message)
        match message:
            case EngineCall(number, ReadWeights(source, version)):
                self.version, self.source = version or 5, source
                is_bad = source.endswith("bad")
                answer = (
                    EngineAnswer(number, "these weights are bad", "model")
                    if is_bad
                    else EngineAnswer(number)
                )
            case EngineCall(number, ReplaceWeights(aborts)):
                self.aborts, answer = aborts, EngineAnswer(number, version=self.version)
            case EngineCall(number, ForgetPrefixes()):
                self.num_resets += 1
                answer = EngineAnswer(number)
            case EngineCall(number, Pause(mode, clear_cache)):
                self.pauses.append((mode, clear_cache))
                answer = EngineAnswer(number)
            case EngineCall(number, Resume()):
                answer = EngineAnswer(number)
            case EngineCall(number, Sleep() | WakeUp() as change):
                self.sleeps.append(change)
                answer = EngineAnswer(number)
            case _:
                return
        asyncio.get_running_loop().call_soon(self._client.take_message, answer)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    (tmp_path / "admin").write_text("# the trainer\nadmin-key\n")
    for name in ("root/step_1", "root/bad", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "root" / "loop").symlink_to("loop")
    return ServerConfig(
        EngineConfig(model="m"),
        api_key=("user-key",),
        admin_key_file=str(tmp_path / "admin"),
        weights_root=str(tmp_path / "root"),
    )


def post(
    config: ServerConfig, calls: Sequence[tuple[str, dict[str, str], Any]]
) -> tuple[list[httpx.Response], UpdatedLink]:
    """The answers to calls of one server, each a path, headers and a body."""

    async def act(stage: Stage) -> tuple[list[httpx.Response], UpdatedLink]:
        link = UpdatedLink(stage.client, stage.link.script)
        stage.client._link = link  # type: ignore[assignment]
        async with stage.http() as http:
            return [
                await http.post(path, headers=headers, json=body) for path, headers, body in calls
            ], link

    return on_stage(saying("ab"), act, config)


def test_only_the_key_of_the_route_opens_it(config: ServerConfig) -> None:
    body = {"model_path": "step_1"}
    refused = [(path, headers, body) for path in (PATH, PATH + "/") for headers in (USER, {})]
    refused += [
        ("/v1/completions", ADMIN, {"model": "m", "prompt": "x"}),
        (PATH + "//", ADMIN, body),
    ]
    accepted = [(PATH, ADMIN, body), (PATH + "/", ADMIN, body)]
    answers, _ = post(
        config, [*refused, *accepted, ("/v1/completions", USER, {"model": "m", "prompt": "x"})]
    )
    assert [answer.status_code for answer in answers] == [401] * len(refused) + [200] * 3
    answers, _ = post(
        dataclasses.replace(config, api_key=()), [*accepted, (PATH + "/", USER, body)]
    )
    assert [answer.status_code for answer in answers] == [200, 200, 401]


def test_an_update_is_answered_with_its_version(config: ServerConfig) -> None:
    calls = [
        (PATH, ADMIN, {"model_path": "step_1"}),
        (
            PATH,
            ADMIN,
            {
                "model_path": "step_1",
                "weight_version": 12,
                "abort_all_requests": True,
                "flush_cache": True,
            },
        ),
    ]
    (first, second), link = post(config, calls)
    assert first.json() == {
        "success": True,
        "message": "the weights were replaced",
        "weight_version": 5,
    }
    assert second.json()["weight_version"] == 12 and link.aborts is True
    assert config.weights_root is not None and link.source == str(
        Path(config.weights_root).resolve() / "step_1"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model_path": "../other"}, "model_path"),
        ({"model_path": "link"}, "model_path"),
        ({"model_path": "/etc"}, "model_path"),
        ({"model_path": "missing"}, "model_path"),
        ({"model_path": "loop"}, "model_path"),
        ({"model_path": "loop/x"}, "model_path"),
        ({"model_path": "step_1\0"}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({}, "model_path"),
        ({"model_path": "bad"}, "model_path"),
        ({"model_path": "step_1", "weight_version": -1}, "weight_version"),
        ({"model_path": "step_1", "flush_cache": False}, "flush_cache"),
        ({"model_path": "step_1", "load_format": "auto"}, "load_format"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str, config: ServerConfig) -> None:
    (answer,), _ = post(config, [(PATH, ADMIN, body)])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_answers_carry_the_version(config: ServerConfig) -> None:
    body = {"model": "m", "prompt": "x"}

    async def act(stage: Stage) -> list[str | None]:
        stage.client.take_message(Updates([], 0, 0, weight_version=9))
        plain = stage.link.script
        stage.link.script = lambda submit: [
            Updates(one.updates, 1, 0, 9) for one in plain(submit) if isinstance(one, Updates)
        ]
        async with stage.http() as http:
            bodies = (body, {**body, "stream": True})
            answers = [
                await http.post("/v1/completions", headers=USER, json=each) for each in bodies
            ]
        return [answer.headers.get("x-orca-weight-version") for answer in answers]

    assert on_stage(saying("ab"), act, config) == ["9", "9"]
    assert on_stage(saying("ab"), act, ServerConfig(EngineConfig(model="m"))) == [None, None]


def test_a_slow_stream_has_the_version_in_a_comment(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_jax.serve.openai.generation.QUIET_SECONDS", 0.02)

    async def act(stage: Stage) -> str:
        plain, stage.link.script = stage.link.script, lambda submit: []
        async with stage.http() as http:
            call = asyncio.create_task(
                http.post(
                    "/v1/completions",
                    headers=USER,
                    json={"model": "m", "prompt": "x", "stream": True},
                )
            )
            while not stage.link.submitted:
                await asyncio.sleep(0)
            for _ in range(100):  # turns of the event loop until the call waits for an update
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            for one in plain(stage.link.submitted[0]):
                assert isinstance(one, Updates)
                stage.client.take_message(Updates(one.updates, 1, 0, 4))
            return (await call).text

    text = on_stage(saying("ab"), act, config)
    assert text.startswith(": keep-alive") and text.count(": x-orca-weight-version: 4\n\n") == 1


def test_without_keys_there_is_no_route() -> None:
    (answer,), _ = post(
        ServerConfig(EngineConfig(model="m")), [(PATH, ADMIN, {"model_path": "step_1"})]
    )
    assert answer.status_code == 404


def test_a_missing_folder_is_refused_at_start(config: ServerConfig, tmp_path: Path) -> None:
    wrong = ServerConfig(
        config.engine, admin_key_file=config.admin_key_file, weights_root=str(tmp_path / "none")
    )

    async def act(stage: Stage) -> None:
        with pytest.raises(ConfigError, match="is not a directory") as caught:
            create_app(stage.service, wrong, stage.observer)
        assert caught.value.param == "weights_root"

    on_stage(saying("ab"), act)


def test_the_prefix_cache_is_emptied_by_its_own_key_alone(config: ServerConfig) -> None:
    calls = [
        (RESET, ADMIN, None),
        (RESET + "/", ADMIN, None),
        (RESET + "?reset_external=false", ADMIN, None),
        (RESET, USER, None),
        (RESET + "/", {}, None),
        (RESET + "?reset_running_requests=true", ADMIN, None),
    ]
    answers, link = post(config, calls)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401, 401, 400]
    assert answers[-1].json()["error"]["param"] == "reset_running_requests"
    assert link.num_resets == 3


def changed(
    config: ServerConfig, wanted: Sequence[tuple[str, str, dict[str, str]]]
) -> tuple[list[httpx.Response], UpdatedLink]:
    """The answers to calls of a method, a path and headers, and the engine that they changed."""

    async def act(stage: Stage) -> tuple[list[httpx.Response], UpdatedLink]:
        link = UpdatedLink(stage.client, stage.link.script)
        stage.client._link = link  # type: ignore[assignment]
        async with stage.http() as http:
            answers = [
                await http.request(method, path, headers=headers)
                for method, path, headers in wanted
            ]
            return answers, link

    return on_stage(saying("ab"), act, config)


def test_sleep_is_opened_by_its_own_key_alone(config: ServerConfig) -> None:
    wanted = [
        ("POST", "/sleep?level=2&mode=wait", ADMIN),
        ("GET", "/is_sleeping", ADMIN),
        ("POST", "/sleep", ADMIN),
        ("POST", "/wake_up?tags=weights", ADMIN),
        ("GET", "/is_sleeping", ADMIN),
        ("POST", "/wake_up", ADMIN),
        ("GET", "/is_sleeping/", ADMIN),
        ("POST", "/sleep", USER),
        ("POST", "/wake_up", {}),
        ("POST", "/sleep?level=3", ADMIN),
        ("POST", "/sleep?mode=keep", ADMIN),
        ("POST", "/wake_up?tag=weights", ADMIN),
        ("POST", "/wake_up?tags=all", ADMIN),
    ]
    answers, link = changed(config, wanted)
    codes = [answer.status_code for answer in answers]
    assert codes == [200, 200, 400, 200, 200, 200, 200, 401, 401, 400, 400, 400, 400]
    assert [answers[place].json()["is_sleeping"] for place in (1, 4, 6)] == [True, True, False]
    refused = [answers[place].json()["error"] for place in (2, 9, 10, 11, 12)]
    assert [error["param"] for error in refused] == [None, "level", "mode", "tag", "tags"]
    assert "sleeps already" in refused[0]["message"]
    assert link.pauses == [("wait", True)]
    assert link.sleeps == [Sleep(2), WakeUp(("weights",)), WakeUp(("weights", "kv_cache"))]


def test_a_pause_is_opened_by_its_own_key_alone(config: ServerConfig) -> None:
    wanted = [
        ("POST", "/pause", ADMIN),
        ("GET", "/is_paused", ADMIN),
        ("POST", "/pause?mode=keep&clear_cache=false", ADMIN),
        ("POST", "/resume", ADMIN),
        ("GET", "/is_paused/", ADMIN),
        ("POST", "/pause", USER),
        ("GET", "/is_paused", {}),
        ("POST", "/pause?mode=stop", ADMIN),
        ("POST", "/pause?wait_for_inflight_requests=true", ADMIN),
    ]
    answers, link = changed(config, wanted)
    codes = [answer.status_code for answer in answers]
    assert codes == [200, 200, 200, 200, 200, 401, 401, 400, 400]
    assert [answers[place].json() for place in (0, 1, 3, 4)] == [
        {"status": "paused"},
        {"is_paused": True},
        {"status": "resumed"},
        {"is_paused": False},
    ]
    assert link.pauses == [("abort", True), ("keep", False)]
    assert [answer.json()["error"]["param"] for answer in answers[-2:]] == [
        "mode",
        "wait_for_inflight_requests",
    ]
