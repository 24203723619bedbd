"""Groups of layers with and without windows, under all schedulers: blocks balance, and no row reads one that it left.

The toy has each token in each group, and raises if a member reads a block that its row has left or another row has got.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from orca_jax.sched import plan
from orca_jax.sched.kv import KVManager
from orca_jax.sched.prefixes import cache as prefix
from orca_jax.sched.prefixes.cache import PrefixCache
from orca_jax.sim.toy_memory import toy_span
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import SpannedPrompt
from tests.sched.drafts.test_scheduler import speculative_lab
from tests.sched.lab import VOCAB, Lab, Shape, groups_of

EOS = 7
LONGEST = 40  # tokens of a request


GROUPS = {
    "full and windows": groups_of(None, 5, 5),
    "windows of two sizes": groups_of(None, 3, 11),
    "two pools": groups_of(None, 6, 6, pools=(0, 1, 1)),
    "windows alone": groups_of(4),
    "full alone": groups_of(None, None),
}
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "orca": ("orca", {"n_workers": 1}, False),
    "orca, two in flight": ("orca", {"n_workers": 2}, False),
    "orca, speculation": ("orca", {"n_workers": 1}, True),
    "request_level": ("request_level", {"n_workers": 2}, False),
    "chunked": ("chunked", {"depth": 1}, False),
    "chunked, overlapped": ("chunked", {"depth": 2}, False),
    "chunked, three ahead": ("chunked", {"depth": 4, "check_in_interval": 3}, False),
    "chunked, speculation": ("chunked", {"depth": 2}, True),
    "chunked, stages": ("chunked", {"depth": 3, "stages": 2}, False),
}


def make_lab(kind: str, dice: Random, has_states: bool = False) -> Lab:
    """A lab with random sizes, and blocks for one and a half of the longest requests or more."""
    name, settings, speculates = KINDS[kind]
    page_size = dice.randint(1, 6)
    sizes: dict[str, Any] = {
        "max_bs": dice.randint(1, 4),
        "page_size": page_size,
        "max_model_len": LONGEST,
        "groups": GROUPS[dice.choice(sorted(GROUPS))],
        "num_drafts": 4 if speculates else 0,
        "eos": [EOS],
    }
    if has_states:
        sizes["spare_states"] = sizes["max_bs"] * settings.get("stages", 1) + dice.randint(0, 9)
    if name == "chunked":
        spare = dice.choice((0, LONGEST // 2, 4 * LONGEST))
        budget = dice.randint(6, 20)
        sizes["shape"] = Shape(
            budget=budget, num_pages=-(-(LONGEST + spare) // page_size), **settings
        )
    else:
        sizes |= {"n_slots": LONGEST + dice.randint(0, 60), **settings}
    return speculative_lab(name, **sizes)[0] if speculates else Lab(name, **sizes)


def with_a_span(ids: list[int], dice: Random) -> Sequence[int]:
    """Most prompts with a vector span, of one of two contents and from one of three uploads, at one of few places."""
    place = dice.choice((0, 2, 7))
    if place >= len(ids) or dice.random() < 0.2:
        return ids
    length = min(dice.choice((1, 4, 15)), len(ids) - place)
    span = toy_span(place, length, name=dice.choice("abc"), first=dice.choice((9, 30)))
    return SpannedPrompt(tuple(ids), (span,))


def play(
    kind: str, seed: int, num_steps: int, has_states: bool = False, has_spans: bool = False
) -> Lab:
    """Arrivals, steps, aborts and preemptions in random order; then every answer is compared with the toy's own."""
    dice = Random(f"{kind} {seed}")
    lab = make_lab(kind, dice, has_states)
    stems = [[dice.randrange(VOCAB) for _ in range(dice.randint(0, 24))] for _ in range(3)]
    wanted: dict[str, tuple[Sequence[int], SamplingParams]] = {}
    aborted = set[str]()
    for _ in range(num_steps):
        action = dice.random()
        if action < 0.35 and len(lab.pool) < 8:
            stem = dice.choice(stems)
            ids = [
                *stem[: dice.randint(0, len(stem))],
                *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 3))),
            ]
            prompt = with_a_span(ids, dice) if has_spans else ids
            params = SamplingParams(
                max_tokens=dice.randint(1, LONGEST - len(prompt)),
                temperature=dice.choice((0.0, 1.0)),
                seed=dice.randrange(9),
                presence_penalty=dice.choice((0.0, 0.0, 0.0, 1.0)),
            )
            for _ in range(dice.choice((1, 1, 1, 3))):  # several samples of a prompt
                wanted[str(len(wanted))] = prompt, params
                lab.engine.add_request(str(len(wanted) - 1), prompt, params)
        elif action < 0.38 and len(lab.pool):
            victim = dice.choice([request.request_id for request in lab.pool])
            if lab.engine.abort(victim):
                aborted.add(victim)
        elif action < 0.41 and kind.startswith("chunked"):
            running = [
                request for request in lab.pool.running.values() if request.finish_reason is None
            ]
            if running:
                lab.pool.preempt(dice.choice(running))
                lab.pool.check_integrity()
        elif action < 0.42:
            lab.kv.prefixes.forget_all()
        else:
            lab.step()
    lab.run()
    assert set(lab.ends) == set(wanted), "every request gets one end"
    for request_id, (prompt, params) in wanted.items():
        tokens, expected = lab.tokens[request_id], lab.expected(prompt, params)
        assert tokens == (expected[: len(tokens)] if request_id in aborted else expected), (
            request_id
        )
    return lab


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_balance_in_any_order(kind: str) -> None:
    """Together more than 5,000 actions."""
    labs = [play(kind, seed, 60) for seed in range(10)]
    if kind == "chunked":
        assert any(lab.pool.num_cache_hits for lab in labs) and any(
            lab.pool.num_preemptions for lab in labs
        )
        assert any(each.copies for lab in labs for each in lab.executor.plans)
    if "speculation" in kind:
        assert any(lab.pool.drafts.num_accepted_tokens for lab in labs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_balance_in_thousands_of_orders(kind: str) -> None:
    for seed in range(100, 1300):
        play(kind, seed, 60)


FIRST, SHARE, BEHIND = KVManager._first_page, KVManager.share, KVManager.behind
COMMON, LEAVE = prefix._num_common, plan._leave


MUTANTS: dict[str, tuple[str, object, str, Callable[..., Any]]] = {
    "a page too many is left": (
        "chunked", KVManager, "_first_page", lambda kv, group, row, start: FIRST(kv, group, row, start + kv.page_size)
    ),
    "a page too few is left": (
        "orca", KVManager, "_first_page", lambda kv, group, row, start: FIRST(kv, group, row, start - kv.page_size)
    ),
    "blocks are left by the end of a plan": (
        "chunked", plan, "_leave", lambda request, start, pool: LEAVE(request, start + request.num_left, pool)
    ),
    "shared blocks count as given back": (
        "chunked, overlapped", KVManager, "behind", lambda kv, row, start: BEHIND(kv, row, start) + kv.of_page
    ),
    "a reservation without the page more": (
        "orca", KVManager, "_slots", lambda kv, num_prompt, max_total: tuple(
            min(max_total, max_total if group.window is None else max(num_prompt, group.window + 1))
            for group in kv.groups
        )
    ),
    "a hit without its window": (
        "chunked", PrefixCache, "_with_window", lambda cache, group, layers, digests, count, *_: count
    ),
    "a token too many is copied": ("chunked", prefix, "_num_common", lambda one, other: COMMON(one, other) + 1),
    "sources are not held": (
        "chunked, overlapped", KVManager, "share", lambda kv, row, hit, _: SHARE(kv, row, hit) or kv.drop(hit.sources)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(*MUTANTS[mutant], monkeypatch)


def check_found(
    kind: str,
    owner: Any,
    name: str,
    mutant: object,
    monkeypatch: pytest.MonkeyPatch,
    has_states: bool = False,
    has_spans: bool = False,
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(60):
            play(kind, seed, 60, has_states, has_spans)
