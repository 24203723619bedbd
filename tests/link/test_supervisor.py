"""Detection of hung engines, and the number of restarts."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from orca_jax.link.client import EngineClient
from orca_jax.link.process_link import EngineLink
from orca_jax.link.restarts.bound import MAX_FAILURES
from orca_jax.link.supervisor import HangDetector, Supervisor
from orca_jax.link.watch import STEP_FLOOR
from orca_jax.link.wire import (
    EngineAnswer,
    EngineCall,
    Failed,
    Heartbeat,
    LoadAdapter,
    Message,
    Ready,
    encode,
)
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, EngineDeadError
from orca_jax.values.startup import LOADING_SILENCE

CONFIG = ServerConfig(heartbeat_timeout=3, load_timeout=100)
READY = Ready("", "byte", vocab_size=257, max_model_len=64, n_slots=1000, num_rows=2)


@pytest.mark.parametrize(
    ("beat", "silence", "passed", "verdict"),
    [
        (None, 1, 99, None),
        (None, 1, 101, "--load-timeout"),
        (None, LOADING_SILENCE + 1, 0, "no heartbeat"),
        (Heartbeat("compiling", 50), LOADING_SILENCE - 1, 0, None),
        (Heartbeat("compiling", 50), 0, 101, "--load-timeout"),
        (Heartbeat("serving", 0), 2.9, 1000, None),
        (Heartbeat("serving", 0), 3.1, 0, "no heartbeat for 3 s"),
        (Heartbeat("serving", STEP_FLOOR - 1), 0, 0, None),
        (Heartbeat("serving", STEP_FLOOR + 1), 0, 0, "no progress for 10 s (--step-timeout"),
        (Heartbeat("serving", 49, limit_seconds=50), 0, 0, None),
        (
            Heartbeat("serving", 51, limit_seconds=50, place="a.py:f"),
            0,
            0,
            "no progress for 50 s in a.py:f",
        ),
    ],
)
@pytest.mark.parametrize("step_timeout", [None, 20])
def test_verdicts(
    beat: Heartbeat | None,
    silence: float,
    passed: float,
    verdict: str | None,
    step_timeout: float | None,
) -> None:
    """A limit set by the operator replaces the measured one."""
    if step_timeout is not None and beat is not None and beat.phase == "serving" and silence == 0:
        verdict = f"no progress for {step_timeout} s" if beat.busy_seconds > step_timeout else None
    detector = HangDetector(dataclasses.replace(CONFIG, step_timeout=step_timeout))
    if beat is not None:
        detector.hear(beat)
    said = detector.verdict(silence, passed)
    assert said is None if verdict is None else said is not None and verdict in said


def test_the_ready_message_ends_the_limits_of_loading() -> None:
    detector = HangDetector(CONFIG)
    detector.serves()
    assert detector.verdict(3.1, 0) is not None


@pytest.mark.anyio
@pytest.mark.parametrize(("share", "ends"), [(0.95, None), (0.0, 3.5), (None, 3.5)])
async def test_silence_counts_only_while_the_engine_could_run(
    share: float | None, ends: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A serving engine is silent for 10 s. A thread of it waits for a processor for a share of them, if known.

    The limit is 3 s; a look every 0.25 s finds the last message up to one look late, and the end too.
    """
    clock, killed = [0.0], list[float]()

    class Link(EngineLink):
        def starved_seconds(self) -> dict[str, float]:
            return {} if share is None else {"heartbeat": share * clock[0], "other": 0.1 * clock[0]}

        def kill(self, reason: str) -> None:
            assert "no heartbeat for 3 s" in reason
            killed.append(clock[0])

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 10:
            raise asyncio.CancelledError

    client = EngineClient(CONFIG)
    link, detector, boss = (
        Link(client.take_message),
        HangDetector(CONFIG),
        Supervisor(CONFIG, client, lambda _: sleep(0)),
    )
    detector.serves()
    link.data_received(encode(Heartbeat("serving", 0)))
    monkeypatch.setattr("orca_jax.link.supervisor.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(
        "orca_jax.link.supervisor.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    if ends is None:
        with pytest.raises(asyncio.CancelledError):
            await boss._watch(link, detector)
    else:
        await boss._watch(link, detector)
    assert killed == ([] if ends is None else [ends])


def link_that(*answers: Any) -> type[EngineLink]:
    """A link class: each engine sends `answers` and ends."""

    class Link(EngineLink):
        async def start(self, config: ServerConfig) -> None:
            for answer in answers:
                self.data_received(encode(answer))
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    return Link


async def supervise(link: type[EngineLink], *, fails: bool = False) -> list[str]:
    """Run the supervisor to its end; return the events in order."""
    events: list[str] = []
    client = EngineClient(ServerConfig(), on_heartbeat=lambda beat: events.append(beat.phase))

    async def on_ready(ready: Ready) -> None:
        assert client.state != "ready", "no call is admitted before"
        if fails:
            raise ConfigError("no tokenizer", "tokenizer")
        events.append("ready")

    async def sleep(seconds: float) -> None:
        events.append(f"sleep {seconds:g}")

    boss = Supervisor(
        ServerConfig(restart_engine=True), client, on_ready, make_link=link, sleep=sleep
    )
    with pytest.raises((EngineDeadError, ConfigError)) as caught:
        await boss.run_engines()
    assert client.state == "dead"
    return [*events, str(caught.value)]


@pytest.mark.anyio
async def test_restarts_are_bounded() -> None:
    events = await supervise(link_that(READY, Failed("it broke")))
    assert events.count("ready") == MAX_FAILURES and events[-1] == "it broke"
    assert [event for event in events if event.startswith("sleep")] == [
        "sleep 0.5",
        "sleep 1",
        "sleep 2",
        "sleep 4",
    ]


@pytest.mark.anyio
async def test_a_first_start_that_fails_is_not_repeated() -> None:
    events = await supervise(
        link_that(Heartbeat("loading", 1), Failed("no such model", "model", True))
    )
    assert events == ["loading", "no such model"]


@pytest.mark.anyio
async def test_a_front_end_that_cannot_serve_the_model_says_so() -> None:
    assert await supervise(link_that(READY), fails=True) == ["no tokenizer"]


@pytest.mark.anyio
async def test_a_start_that_fails_twice_by_one_adapter_goes_on_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of the settings included; a start that fails so does not count as a failure of the engine."""
    settings = EngineConfig(model="preset:toy", enable_lora=True, lora_modules=("bad=x", "good=y"))
    config = ServerConfig(settings, restart_engine=True)
    client = EngineClient(config)
    loads: list[list[str]] = []  # of each engine
    served: list[dict[str, str]] = []

    class Link(EngineLink):
        async def start(self, config: ServerConfig) -> None:
            loads.append(list(config.engine.lora_paths))
            self.data_received(
                encode(msgspec.structs.replace(READY, adapters=tuple(config.engine.lora_paths)))
            )

        def send(self, message: Message) -> None:
            assert isinstance(message, EngineCall) and isinstance(message.change, LoadAdapter)
            loads[-1].append(message.change.name)
            soon = asyncio.get_running_loop().call_soon
            if message.change.name == "bad":
                soon(self.connection_lost, None)
            else:
                soon(self.data_received, encode(EngineAnswer(message.number)))

        async def exit_reason(self) -> EngineDeadError:
            return EngineDeadError("it broke")

    async def on_ready(ready: Ready) -> None:
        served.append(dict(client.adapters.loaded))
        asyncio.get_running_loop().call_later(0.01, lambda: links[-1].connection_lost(None))

    links: list[EngineLink] = []

    def make_link(take: Any, begun: float | None) -> EngineLink:
        links.append(Link(take, begun))
        return links[-1]

    async def sleep(seconds: float) -> None:
        pass

    with pytest.raises(EngineDeadError):
        await Supervisor(config, client, on_ready, make_link=make_link, sleep=sleep).run_engines()
    assert loads[:4] == [["bad", "good"], ["bad"], ["bad"], ["good"]]
    assert served == [{}] + [{"good": "y"}] * (MAX_FAILURES - 1), "all other ends count"
    assert client.adapters.lost == {"bad": "2 engines ended while they loaded it again"}
    assert "the adapter bad is not loaded any more" in caplog.text
