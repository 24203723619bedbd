"""A toy engine with a small prefix cache, and the pages that it gives up."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca_jax.policy import API, Keeping, KeptSpan
from orca_jax.policy.retention import PolicyRetention
from orca_jax.sched.prefixes.spans import EngineRetention, Retainer
from orca_jax.values.cache_hints import CacheHints
from orca_jax.values.request import SamplingParams, Urgency
from tests.sched.lab import Lab, Shape, groups_of


@dataclass
class Removed:
    """Records the full pages that cannot be found any more, in their order."""

    pages: list[tuple[bytes, int]] = field(default_factory=list)

    def stored(self, *values: Any) -> None:
        """Not recorded."""

    def removed(self, digest: bytes, group: int) -> None:
        self.pages.append((digest, group))


class Small:
    """An engine with 12 pages of 4 tokens, whose requests run one after another unless it is said."""

    def __init__(
        self,
        retention: EngineRetention | None = None,
        *,
        windows: Sequence[int | None] = (None,),
        num_pages: int = 12,
        pools: Sequence[int] = (),
    ) -> None:
        shape = Shape(budget=16, num_pages=num_pages)
        self.lab = Lab(
            max_bs=2,
            page_size=4,
            max_model_len=40,
            shape=shape,
            groups=groups_of(*windows, pools=pools),
        )
        self.retainer: Retainer | None = None
        if retention is not None:
            self.retainer = Retainer(retention, 4, lambda: self.lab.pool.now)
            self.lab.kv.retain(self.retainer)
        self.removed = Removed()
        self.lab.kv.prefixes.watcher = self.removed
        self.count = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        hints: CacheHints | None = None,
        urgency: Urgency = Urgency(),  # noqa: B008 - frozen
    ) -> str:
        name = str(self.count)
        self.count += 1
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_hints=hints
        )
        self.lab.engine.add_request(name, prompt, params, urgency=urgency)
        return name

    def answer(self, prompt: Sequence[int], **fields: Any) -> int:
        """Serve a request to its end; the cached tokens of its prompt."""
        name = self.submit(prompt, **fields)
        before = self.lab.pool.num_cache_hits
        self.lab.run()
        assert self.lab.ends[name].finish_reason == "length"
        return self.lab.pool.num_cache_hits - before


def prompt(number: int, length: int = 16) -> list[int]:
    """A prompt that begins like no other one."""
    return [number, *[(number + 7 * place) % 50 for place in range(length - 1)]]


def keeping(keep: Callable[[KeptSpan, float], Any], **methods: Any) -> PolicyRetention:
    """A class from outside with this method, as the engine has it."""
    members = {"api": API, "keep": staticmethod(keep)}
    members |= {name: staticmethod(method) for name, method in methods.items()}
    return PolicyRetention(type("Tried", (), members)(), "Tried")


def random_load(seed: int, small: Small) -> None:
    """Serve requests with common beginnings, in part at the same time, with aborts."""
    dice = random.Random(seed)
    stems = [prompt(number, dice.randint(3, 20)) for number in range(4)]
    for _ in range(60):
        tail = [dice.randrange(50) for _ in range(dice.randint(1, 9))]
        session = Urgency(tenant=dice.choice("ab"), program=dice.choice(["", "x", "y"]))
        ends = CacheHints("s", ends=True) if dice.random() < 0.1 else None
        name = small.submit(
            dice.choice(stems) + tail, dice.randint(1, 9), hints=ends, urgency=session
        )
        for _ in range(dice.randrange(4)):
            small.lab.step()
        if dice.random() < 0.1:
            small.lab.engine.abort(name)
    small.lab.run()


ALWAYS = Keeping(0.0)
