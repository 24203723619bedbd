"""The loads of retentions: prompts that come again, of agents and of public traces.

All lengths are an eighth to a sixteenth of real ones, as the memory of the simulated device is.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from lab.shelf.loads import DEVICES, SCALES, TRACES
from lab.shelf.virtual import FIRST_ID, Call
from orca_jax.sim.executor import END_ID, OTHER_ID
from orca_jax.tools.bench.workload.generate import make_workload
from orca_jax.values.cache_hints import CacheHints, CacheWish

KINDS = 4
"""Kinds of agents: each has a system prompt and tools of its own."""
MEDIANS = (2.0, 6.0, 20.0, 60.0)
"""Seconds of the median tool call of each kind; the times are log-normal."""
SPREAD = 1.0  # of the logarithm
SYSTEM = 320  # tokens of a system prompt
LONGEST = 1600  # tokens of a prompt of an agent
TEMPLATES = 24
TEMPLATE = 192  # tokens; the traces of Azure have lengths alone, and no text
LEASE = CacheWish(ttl=300.0)
"""The wish of each call of an agent: Anthropic's default time."""
IDS = 30_000
BLOCK = 32  # tokens of a block of Mooncake's trace, after scaling
SHARED_BLOCKS = 2  # at the begin, that prompts of several conversations have


def agents(rate: float, count: int, seed: int, traces: Path | None = None) -> list[Call]:
    """Agents that call a tool after each answer: geometric numbers of calls, 8 on average, and growing histories.

    Args:
        rate: calls per second that new agents bring with them.
        count: calls.
        seed: of all draws.
        traces: not used.
    """
    dice = random.Random(f"retention-agents-{seed}")
    systems = [[FIRST_ID + kind, *_text(dice, SYSTEM - 1)] for kind in range(KINDS)]
    calls: list[Call] = []
    at = 0.0
    while len(calls) < count:
        kind = dice.randrange(KINDS)
        num_calls = _geometric(dice, 1 / 8)
        at += dice.expovariate(1.0) / rate * 8
        name = f"agent-{len(calls)}"
        prompt = [*systems[kind], *_text(dice, dice.randint(16, 64))]
        gap = at
        for number in range(num_calls):
            output = min(96, 4 + int(dice.expovariate(1 / 24)))
            result = _text(dice, min(160, 8 + int(dice.expovariate(1 / 48))))
            follows = [*prompt, *[OTHER_ID] * (output - 1), END_ID, *result]
            is_last = number == num_calls - 1 or len(follows) > LONGEST
            hints = CacheHints(name, is_last, (LEASE,))
            after = len(calls) - 1 if number else None
            size = len(prompt)
            calls.append(Call(gap, size, output, 0, f"kind-{kind}", after, prompt, name, hints))
            if is_last:
                break
            gap = MEDIANS[kind] * dice.lognormvariate(0.0, SPREAD)
            prompt = follows
    return calls


def mooncake(rate: float, count: int, seed: int, traces: Path | None = None) -> list[Call]:
    """Conversations of the trace of Mooncake, whose prompts share blocks.

    The trace names no conversations: a request is of that of the longest earlier prompt that its own begins with.
    """
    calls = _of_trace("mooncake", rate, count, seed, traces, lambda ids, dice: ids)
    known: dict[int, str] = {}  # the conversation of each beginning
    found: list[Call] = []
    for number, call in enumerate(calls):
        begins = list(accumulate(call.prompt, lambda before, token: hash((before, token))))[
            BLOCK - 1 :: BLOCK
        ]
        earlier = [known[each] for each in begins[SHARED_BLOCKS:] if each in known]
        name = earlier[-1] if earlier else f"talk-{number}"
        known.update(dict.fromkeys(begins, name))
        found.append(call._replace(program=name))
    return found


def azure(rate: float, count: int, seed: int, traces: Path | None = None) -> list[Call]:
    """Lengths of the trace of Azure's conversations, each prompt after one of a few templates, some more popular."""
    dice = random.Random(f"retention-templates-{seed}")
    templates = [[FIRST_ID + n, *_text(dice, TEMPLATE - 1)] for n in range(TEMPLATES)]
    weights = [1 / (n + 1) for n in range(TEMPLATES)]

    def prompt(ids: Sequence[int], dice: random.Random) -> Sequence[int]:
        (template,) = dice.choices(templates, weights)
        return [*template, *ids[: DEVICES.longest // 2]]

    return _of_trace("azure", rate, count, seed, traces, prompt)


LOADS: Mapping[str, Callable[[float, int, int, Path | None], list[Call]]] = {
    "agents": agents,
    "mooncake": mooncake,
    "azure": azure,
}
"""Loads by name; those of traces need the directory of `shelf.loads.TRACES`."""


def _of_trace(
    name: str,
    rate: float,
    count: int,
    seed: int,
    traces: Path | None,
    prompt: Callable[[Sequence[int], random.Random], Sequence[int]],
) -> list[Call]:
    """Requests of a trace from a place by the seed on, with Poisson arrivals."""
    kind, file = TRACES[name]
    workload = make_workload(
        kind, num_requests=count * (1 + seed), vocab_size=IDS, seed=seed, rate=None, max_model_len=DEVICES.longest,
        data=None if traces is None else str(traces / file), length_scale=SCALES[name],
    )[-count:]  # fmt: skip
    dice = random.Random(f"retention-{name}-{seed}")
    calls: list[Call] = []
    at = 0.0
    for each in workload:
        at += dice.expovariate(1.0) / rate
        ids = list(prompt(each.prompt_ids, dice))
        calls.append(Call(at, len(ids), each.num_output, prompt=ids))
    return calls


def _text(dice: random.Random, number: int) -> list[int]:
    return [dice.randrange(FIRST_ID + 100, IDS) for _ in range(number)]


def _geometric(dice: random.Random, chance: float) -> int:
    number = 1
    while dice.random() > chance and number < 40:
        number += 1
    return number
