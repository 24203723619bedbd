"""The engine and its scheduler against the paper's Algorithm 1, in random scenarios.

The same comparison finds mutants of the oracle and of the scheduler.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orca_jax.sched import orca
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Handle
from tests.sched import algorithm_1 as oracle
from tests.sched import lab
from tests.sched.algorithm_1 import Req, World
from tests.sched.lab import Lab, groups_of

EOS = 7
FEW, MANY = 50, 6000
Oracle = Callable[[World, int, int, int], Iterator[str]]


@dataclass(frozen=True)
class Scenario:
    """Random requests and settings. `n_slots` is between the longest request alone and most of them together."""

    seed: int
    n_workers: int
    max_bs: int
    n_slots: int
    page_size: int
    requests: list[Req]
    groups: tuple[LayerGroup, ...] = ONE_GROUP


def scenario(seed: int) -> Scenario:
    dice = Random(seed)
    requests = []
    for number in range(dice.randint(1, 24)):
        num_prompt, longest = dice.randint(1, 12), dice.randint(1, 24)
        generated = dice.choice([longest, dice.randint(1, longest)])
        requests.append(Req(chr(ord("A") + number), num_prompt, num_prompt + longest, generated))
    least, most = (
        max(each.max_tokens for each in requests),
        sum(each.max_tokens for each in requests),
    )
    n_slots = min(least + int(dice.expovariate(1 / 30)), most)
    return Scenario(
        seed, dice.randint(1, 4), dice.randint(1, 6), n_slots, dice.randint(1, 8), requests
    )


def served(case: Scenario) -> Iterator[str]:
    """What the engine does, in the words of the oracle; every request must get all of its tokens."""
    ends = {each.name: each.num_prompt + each.num_generated - 1 for each in case.requests}
    lab = Lab(
        "orca", case.max_bs, case.n_workers, case.n_slots, case.page_size, eos=[EOS], groups=case.groups,
        override=lambda name, length, choice: EOS if length == ends[name] else choice if choice != EOS else EOS + 1,
    )  # fmt: skip
    world = World(case.requests, case.seed)
    was_interrupted = False

    def wait(_: Handle) -> bool:
        nonlocal was_interrupted
        was_interrupted = world.interrupts()
        return not was_interrupted

    def add(requests: list[Req]) -> None:
        for each in requests:
            params = SamplingParams(each.max_tokens - each.num_prompt, temperature=0.0)
            lab.engine.add_request(each.name, [1] * each.num_prompt, params)

    lab.wait = wait
    add(world.arrive(1))
    while lab.engine.has_work:
        was_interrupted, num_plans, num_returned = (
            False,
            len(lab.executor.plans),
            lab.engine.stats.iterations,
        )
        lab.step()
        yield from lab.batches[num_plans:]
        if was_interrupted:
            add(world.arrive(1))
            continue
        assert lab.engine.stats.iterations == num_returned + 1, "requests starve"
        yield f"> {lab.returned[-1]}, {lab.kv.reserved_slots}"
        add(world.arrive(0 if lab.engine.has_work else 1))
    lab.run(limit=0)
    assert {name: len(tokens) for name, tokens in lab.tokens.items()} == {
        each.name: each.num_generated for each in case.requests
    }


def slots(request: Req, window: int | None, page_size: int) -> int:
    """The most tokens that a request has in one group: its longest plan, or a window and a page left in part."""
    if window is None:
        return request.max_tokens
    return min(request.max_tokens, max(request.num_prompt, window + 1) + page_size)


def check(case: Scenario, algorithm: Oracle = oracle.algorithm_1) -> int:
    """Compare the engine with an oracle, and return the number of iterations."""
    requests = deepcopy(case.requests)
    for each in requests:  # the paper's slots are those of all layers; here each group has its own
        each.max_tokens = sum(slots(each, group.window, case.page_size) for group in case.groups)
    world = World(requests, case.seed)
    found = list(served(case))
    assert found == list(
        algorithm(world, case.n_workers, case.max_bs, len(case.groups) * case.n_slots)
    ), case
    return sum(not each.startswith(">") for each in found)


def test_the_engine_follows_algorithm_1() -> None:
    assert sum(check(scenario(seed)) for seed in range(FEW)) > 20 * FEW


@pytest.mark.parametrize("windows", [(None, 4), (None, 3, 9), (5,)])
def test_the_engine_follows_algorithm_1_with_groups(windows: tuple[int | None, ...]) -> None:
    cases = [replace(scenario(seed), groups=groups_of(*windows)) for seed in range(FEW, FEW + 20)]
    assert sum(check(case) for case in cases) > 20 * 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_follows_algorithm_1_in_many_scenarios() -> None:
    cases = [scenario(seed) for seed in range(MANY)]
    assert all(
        sum(case.n_workers == number for case in cases) > MANY // 5 for number in (1, 2, 3, 4)
    )
    assert sum(check(case) for case in cases) > 20 * MANY


def mutated(path: str | None, old: str, new: str) -> dict[str, Any]:
    """The names of a module after a change of its source."""
    source = Path(str(path)).read_text()
    assert source.count(old) == 1, f"{path} has changed: {old!r}"
    names: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(source.replace(old, new), "mutant", "exec", dont_inherit=True), names)
    return names


def is_found(algorithm: Oracle = oracle.algorithm_1) -> bool:
    for seed in range(FEW):
        try:
            check(scenario(seed), algorithm)
        except AssertionError:
            return True
    return False


ORACLES = {
    "continue for break": ("n_slots:  # 25\n                break", "n_slots:  # 25\n                continue"),
    "reversed order": ("for req in pool if", "for req in pool[::-1] if"),
    "a slot too many": ("new_n_rsrv > n_slots", "new_n_rsrv > n_slots + 1"),
    "a slot too few": ("new_n_rsrv > n_slots", "new_n_rsrv >= n_slots"),
    "a request too many": ("len(batch) == max_bs", "len(batch) > max_bs"),
    "one worker more": ("if n_scheduled == n_workers or", "if n_scheduled == n_workers + 1 or"),
    "an iteration waits for the whole pipeline": ("scheduled.pop(0)", "scheduled.pop()"),
    "the reservation stays": ("n_rsrv = n_rsrv - req.max_tokens", "pass"),
    "generated tokens alone are reserved": (
        "new_n_rsrv = n_rsrv + req.max_tokens", "new_n_rsrv = n_rsrv + req.max_tokens - req.num_prompt"
    ),
    "running requests are selected again": ('if req.state != "RUNNING"]', "]"),
}  # fmt: skip


@pytest.mark.parametrize("change", ORACLES.values(), ids=ORACLES)
def test_a_wrong_oracle_is_found(change: tuple[str, str]) -> None:
    assert is_found(mutated(oracle.__file__, *change)["algorithm_1"])


SCHEDULERS_CHANGED = {
    "continue for break": (
        "n_rsrv += kv.demand(len(request.prompt_ids), request.max_total)  # 24, 26\n",
        "if n_rsrv + request.max_total > kv.capacity:\n                    continue\n"
        "                n_rsrv += request.max_total\n",
    ),
    "reversed order": ("for request in pool:", "for request in reversed(list(pool)):"),
    "a slot too many": ("if n_rsrv > kv.capacity", "if n_rsrv > kv.capacity + 1"),
    "a slot too few": ("if n_rsrv > kv.capacity", "if n_rsrv >= kv.capacity"),
    "a request too many": ("len(batch) == self.max_bs", "len(batch) > self.max_bs"),
    "one worker more": ("self.n_workers = n_workers", "self.n_workers = n_workers + 1"),
    "one worker": ("self.n_workers = n_workers", "self.n_workers = 1"),
}


@pytest.mark.parametrize("change", SCHEDULERS_CHANGED.values(), ids=SCHEDULERS_CHANGED)
def test_a_wrong_scheduler_is_found(
    change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = mutated(orca.__file__, *change)["OrcaScheduler"]
    monkeypatch.setattr(lab, "scheduler_kind", {"orca": wrong}.__getitem__)
    assert is_found()
