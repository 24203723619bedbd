"""A toy whose weights are a number added to every token, and updates of it, also under load."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import ready_message
from orca_jax.link.thread_link import EngineThread
from orca_jax.link.wire import Submit
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams, of_candidate

VOCAB = 256
PAGE_SIZE, PAGES, ROWS = 4, 1024, 6


class ShiftedToy:
    """An engine of a toy; an update from "7" makes its weights 7, and one from "bad" is refused."""

    def __init__(self, latency: float = 0.0, **settings: Any) -> None:
        self.shift = 0
        self.prepared: list[str] = []
        executor = ToyExecutor(
            257,
            (PAGES,),
            PAGE_SIZE,
            ROWS,
            latency=latency,
            override=lambda request, length, choice: (choice + self.shift) % VOCAB,
        )
        config = EngineConfig(
            "preset:toy", num_pages=PAGES, page_size=PAGE_SIZE, max_num_seqs=ROWS, **settings
        )
        plain = build_engine(config)
        engine = Engine(executor, plain.engine.scheduler, plain.engine.pool)
        self.built: Built = dataclasses.replace(plain, engine=engine, prepare_update=self.prepare)

    @property
    def engine(self) -> Engine:
        return self.built.engine

    def prepare(self, source: str) -> Callable[[Callable[[], None]], None]:
        self.prepared.append(source)
        if source == "bad":
            raise ConfigError("these weights are bad", param="model")

        def put(progress: Callable[[], None]) -> None:
            progress()
            self.shift = int(source)

        return put


def expected(prompt: list[int], count: int, shift: int) -> list[int]:
    """The tokens of the shifted toy for a greedy request."""
    ids = list(prompt)
    for _ in range(count):
        favourite = sum((i + 1) * (token + 1) for i, token in enumerate(ids)) % 257
        ids.append((favourite + shift) % VOCAB)
    return ids[len(prompt) :]


class Front:
    """A front end of a shifted toy in a thread. An async context manager."""

    def __init__(self, toy: ShiftedToy) -> None:
        self.toy = toy

    async def __aenter__(self) -> "Front":
        self.client = EngineClient(ServerConfig(EngineConfig("preset:toy")))
        self.thread = EngineThread(self.toy.built, self.client)
        self.client.attach(self.thread)
        self.client.serve(ready_message(self.toy.built))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.thread.stop()
        assert self.thread.failure is None

    async def answer(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[int, list[list[int]], list[str]]:
        """The version of one call, the tokens of each candidate, and their finish reasons."""
        ids = [self.client.new_request_id() for _ in range(params.n)]
        submits = [
            Submit(name, prompt, of_candidate(params, index)) for index, name in enumerate(ids)
        ]
        tokens: dict[str, list[int]] = {name: [] for name in ids}
        ends: dict[str, str] = {}
        versions = set()
        async with self.client.open(submits) as call:
            while len(ends) < len(ids):
                for update in await call.receive():
                    tokens[update.request_id] += update.new_ids  # type: ignore[union-attr]
                    if update.finish_reason is not None:  # type: ignore[union-attr]
                        ends[update.request_id] = update.finish_reason  # type: ignore[union-attr]
                versions.add(call.weight_version)
        assert len(versions) == 1, f"the updates of one call have the versions {versions}"
        return versions.pop(), [tokens[name] for name in ids], [ends[name] for name in ids]


def run_front[T](toy: ShiftedToy, act: Callable[[Front], Any]) -> T:
    async def run() -> T:
        async with Front(toy) as front:
            result: T = await act(front)
            return result

    return asyncio.run(asyncio.wait_for(run(), 60))
