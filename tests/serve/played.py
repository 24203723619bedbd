"""The whole application over a scripted engine, for behaviour that a healthy toy never shows."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec

from orca_jax.assembly.choices import choices_of
from orca_jax.link.client import EngineClient
from orca_jax.link.wire import Abort, Message, Ready, Rejected, Submit, Updates
from orca_jax.serve.app import create_app
from orca_jax.serve.openai.model import Model, Service
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import RequestUpdate
from tests.text.lasting import lasting_template

READY = Ready("", "byte", vocab_size=257, max_model_len=2048, n_slots=1024, num_rows=64)
CONTEXT = 1024

News = Updates | Rejected
Script = Callable[[Submit], Sequence[News]]


class PlayedLink:
    """Answers every `Submit` with the messages of the script, soon."""

    def __init__(self, client: EngineClient, script: Script) -> None:
        self._client = client
        self.script = script
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []

    def send(self, message: Message) -> None:
        if isinstance(message, Abort):
            self.aborted.append(message.request_id)
        elif isinstance(message, Submit):
            self.submitted.append(message)
            for answer in self.script(message):
                asyncio.get_running_loop().call_soon(self._client.take_message, answer)


class Stage:
    """A server over a scripted engine."""

    def __init__(self, script: Script, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig(EngineConfig(model="m"))
        self.observer = ServerObserver(self.config)
        self.client = EngineClient(self.config, self.observer.heartbeat)
        self.observer.follow(self.client)
        self.link = PlayedLink(self.client, script)
        self.service = Service(self.client, self.config, self.observer)
        self.app = create_app(self.service, self.config, self.observer)
        self.client.attach(self.link)  # type: ignore[arg-type]

    async def start(self, chats: bool) -> None:
        """Begin to serve, with `chats` by a chat template."""
        reads = choices_of(self.config.engine).batches.reads
        self.client.serve(msgspec.structs.replace(READY, reads=reads))
        if chats:
            with lasting_template():
                await self.service.set_ready(READY)
        else:
            self.service._model = Model(
                load_tokenizer("byte"), None, {}, 257, 2048, CONTEXT * 7, CONTEXT
            )

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)

    def ends(self) -> dict[str, float]:
        """Finished requests by reason, from the metrics."""
        text = self.observer.render().decode()
        found = re.findall(
            r'^\S*request_success_total\{.*finished_reason="(\w+)".*\} (\S+)$', text, re.MULTILINE
        )
        return {reason: float(count) for reason, count in found if float(count)}


def on_stage[T](
    script: Script,
    act: Callable[[Stage], Awaitable[T]],
    config: ServerConfig | None = None,
    *,
    is_ready: bool = True,
    chats: bool = False,
) -> T:
    """Run `act` on a new stage; `chats` adds a chat template."""

    async def run() -> T:
        stage = Stage(script, config)
        try:
            if is_ready:
                await stage.start(chats)
            return await act(stage)
        finally:
            stage.service.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def call(
    script: Script, path: str = "/v1/completions", config: ServerConfig | None = None, **fields: Any
) -> tuple[httpx.Response, PlayedLink]:
    """The answer to one call, and the link with the messages to the engine."""
    body = {
        "model": "m",
        **({"messages": [user("x")]} if "chat" in path else {"prompt": "x"}),
        **fields,
    }

    async def act(stage: Stage) -> tuple[httpx.Response, PlayedLink]:
        async with stage.http() as http:
            return await http.post(path, json=body), stage.link

    return on_stage(script, act, config, chats="chat" in path)


def chat(
    script: Script, config: ServerConfig | None = None, **fields: Any
) -> tuple[httpx.Response, PlayedLink]:
    return call(script, "/v1/chat/completions", config, **fields)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def update(submit: Submit, *ids: int, **fields: Any) -> Updates:
    return Updates([RequestUpdate(submit.request_id, ids, **fields)], running=1, waiting=0)


def saying(*texts: str, reason: Any = "stop") -> Script:
    """An engine that generates these texts, one update each, and ends; "stop" ends by the end token."""

    def script(submit: Submit) -> list[News]:
        news: list[News] = [update(submit, *text.encode()) for text in texts]
        end = (256,) if reason == "stop" else ()
        return [*news, update(submit, *end, finish_reason=reason)]

    return script


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`."""
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts if not part.startswith(":")]
