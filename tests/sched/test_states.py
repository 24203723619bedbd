"""Recurrent states under all schedulers: moves, snapshots, and hits counted in computed tokens.

The toy raises if a member reads a state block that was never written, or that another row wrote into.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from orca_jax.sched import states
from orca_jax.sched.blocks import BlockPool
from orca_jax.sched.kv import KVManager
from orca_jax.sched.prefixes.cache import PrefixCache
from orca_jax.sched.prefixes.reuse import PrefixReuse
from orca_jax.sched.states import States
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Member, StateMove
from tests.covering import covering, slow
from tests.sched.lab import Lab, Shape, groups_of
from tests.sched.test_groups import GROUPS, KINDS, check_found, play
from tests.sched.test_prefix import GREEDY, SIZES, computed, serve

PLAIN = [kind for kind in KINDS if "speculation" not in kind]


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots every 8 tokens or so."""
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr(states, "WORTH_A_SNAPSHOT", 4)


def state_lab(
    page_size: int = 4,
    *,
    groups: str = "full alone",
    depth: int = 2,
    budget: int = 64,
    **sizes: Any,
) -> Lab:
    settings = {"max_bs": 8, "max_model_len": 512, "spare_states": 40} | sizes
    shape = Shape(budget=budget, depth=depth, num_pages=settings.pop("num_pages", None))
    return Lab(page_size=page_size, groups=GROUPS[groups], shape=shape, **settings)


def moves(lab: Lab, request_id: str) -> list[tuple[int, int]]:
    members: list[Member] = [member for plan in lab.executor.plans for member in plan.members]
    return [
        member.state
        for member in members
        if member.request_id == request_id and member.state is not None
    ]


@pytest.mark.usefixtures("dense")
def test_moves_by_hand() -> None:
    """Borders are 8, and 13 before the last token of the prompt. At the end the state of 16 tokens is kept."""
    lab = state_lab(depth=1)
    text = serve(lab, "A", list(range(14)), SamplingParams(max_tokens=3, temperature=0))
    assert lab.batches == ["A8-", "A5-", "A1", "A1", "A1"]
    assert moves(lab, "A") == [(-1, 0), (0, 1), (1, 2), (2, 2), (2, 2)]
    assert lab.engine.stats.state_blocks == (0, 3, 45)
    lab.add("X", 1, 1)  # prompt: the id 1
    lab.engine.add_request("B", list(range(14)), SamplingParams(max_tokens=2, temperature=0))
    lab.engine.add_request("C", [*text, 1, 2, 3, 4, 5], SamplingParams(max_tokens=1, temperature=0))
    lab.run()
    assert lab.batches[5:] == ["X1 B1 C5-", "B1 C1"], (
        "C begins with 16 of its 22 tokens, and has a border at 21"
    )
    assert moves(lab, "X") == [(-1, 3)]
    assert moves(lab, "B") == [(1, 4), (4, 4)]
    assert moves(lab, "C") == [(2, 5), (5, 3)], "block 3 is free and nameless again"


@pytest.mark.parametrize(
    ("page_size", "num_prompt", "groups"),
    covering(
        product(
            SIZES,
            (2, 16, 17, 50, 128),
            ("full alone", "windows of two sizes", "two pools", "windows alone"),
        )
    ),
)
def test_the_same_prompt_again_computes_one_token(
    page_size: int, num_prompt: int, groups: str
) -> None:
    """A prompt of 16 tokens or fewer leaves no snapshot, unless another one is near its end."""
    lab = state_lab(page_size, groups=groups)
    prompt = [number % 59 for number in range(num_prompt)]
    for request_id in "AB":
        serve(lab, request_id, prompt)
    assert [computed(lab, request_id) for request_id in "AB"] == [
        num_prompt,
        1 if num_prompt > 16 else num_prompt,
    ]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", [16, 17, 130])
@pytest.mark.parametrize("page_size", SIZES)
def test_further_samples_compute_one_token(page_size: int, num_prompt: int, depth: int) -> None:
    """Those of a short prompt do not wait for the first one: it leaves no snapshot."""
    lab = state_lab(page_size, depth=depth, budget=100)
    prompt = [number % 59 for number in range(num_prompt)]
    for seed in range(6):
        lab.engine.add_request(str(seed), prompt, SamplingParams(max_tokens=9, seed=seed))
    lab.run()
    more = [16] * 5 if num_prompt == 16 else [1] * 5
    assert [computed(lab, str(seed)) for seed in range(6)] == [num_prompt, *more]
    assert num_prompt > 16 or lab.batches[0] == "016 116 216 316 416 516", "all at once"
    for seed in range(6):
        assert lab.tokens[str(seed)] == lab.expected(
            prompt, SamplingParams(max_tokens=9, seed=seed)
        )


@pytest.mark.parametrize(
    ("budget", "batches"), [(24, ["B10 C10", "B1 C1"]), (6, ["B6-", "B4 C2-"])]
)
def test_no_sample_waits_for_a_few_tokens(budget: int, batches: list[str]) -> None:
    """B and C begin with the state of 39 tokens. Ten are left: no snapshot will be nearer."""
    lab = state_lab(depth=1, budget=budget)
    text = serve(lab, "A", list(range(40)))
    for name in "BC":
        lab.engine.add_request(name, [*text[:40], *range(9)], GREEDY)
    lab.run()
    first = next(index for index, batch in enumerate(lab.batches) if "B" in batch)
    assert lab.batches[first : first + 2] == batches


@pytest.mark.parametrize("groups", ["full alone", "windows of two sizes", "two pools"])
@pytest.mark.parametrize("page_size", SIZES)
def test_a_turn_of_a_chat_computes_its_new_tokens_and_the_last_sampled_one(
    page_size: int, groups: str
) -> None:
    """The state of the turn before is kept at its end; the page begun there is copied, however few its tokens are."""
    lab = state_lab(page_size, groups=groups)
    text = serve(lab, "0", [number % 61 for number in range(50)])
    for turn in range(1, 5):
        num_kept = len(text) - 1
        text = serve(lab, str(turn), [*text, *range(10 * turn, 10 * turn + 10 + turn)])
        assert computed(lab, str(turn)) == len(text) - 9 - num_kept


@pytest.mark.parametrize("page_size", SIZES)
def test_a_template_that_drops_the_thinking_computes_from_the_last_token_of_the_prompt_on(
    page_size: int,
) -> None:
    lab = state_lab(page_size)
    asked = [number % 61 for number in range(40)]
    text = serve(lab, "A", asked, SamplingParams(max_tokens=60, temperature=0))
    prompt = [*asked, *text[80:], *range(8)]
    serve(lab, "B", prompt)
    assert computed(lab, "B") == len(prompt) - 39


@pytest.mark.parametrize(
    ("num_prompt", "batches", "again"),
    [
        (30, ["A29-", "A1"], 1),
        (33, ["A32-", "A1"], 1),  # both borders are the same one
        (48, ["A32-", "A16"], 16),  # 47 is too near to 32
        (49, ["A32-", "A16-", "A1"], 1),
        (100, ["A32-", "A32-", "A32-", "A4"], 4),
    ],
)
def test_snapshots_within_a_prompt(
    num_prompt: int, batches: list[str], again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 35)  # eight pages of four
    lab = state_lab()
    params = SamplingParams(max_tokens=1, temperature=0)
    for request_id in "AB":
        serve(lab, request_id, [number % 61 for number in range(num_prompt)], params)
    assert lab.batches[: len(batches)] == batches
    assert computed(lab, "B") == again


def test_snapshots_while_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that leaves another one at its 50th token continues from the snapshot at 48; iterations overlap."""
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 16)
    lab = state_lab()
    text = serve(lab, "A", [5, 6, 7], SamplingParams(max_tokens=80, temperature=0))
    serve(lab, "B", [*text[:50], (text[50] + 1) % 61, *range(9)])
    assert computed(lab, "B") == 60 - 48


@pytest.mark.parametrize(
    ("window", "interval", "expected"), [(2, 2, 1), (2, 3, 29), (3, 3, 1), (6, 6, 1), (5, 6, 29)]
)
def test_a_window_shorter_than_the_check_in_interval_loses_pages(
    window: int, interval: int, expected: int
) -> None:
    """A block leaves its window before the host knows the ids of its page, so it gets no name and no hit."""
    shape = Shape(budget=8, depth=interval + 1, check_in_interval=interval)
    groups, again = groups_of(None, window, window), []
    for number in (8, 30):
        lab = Lab(
            page_size=8, groups=groups, shape=shape, max_bs=8, max_model_len=512, spare_states=40
        )
        for name in "AB":
            serve(lab, name, list(range(29)), SamplingParams(max_tokens=number, temperature=0))
        again.append(computed(lab, "B"))
    assert max(again) == expected


def test_without_room_for_snapshots_all_is_in_place() -> None:
    lab = state_lab(spare_states=7)  # of 8 rows
    for request_id in "AB":
        serve(lab, request_id, list(range(40)))
    assert lab.batches[0] == "A40", "no border"
    assert computed(lab, "B") == 40
    assert all(source in (-1, target) for name in "AB" for source, target in moves(lab, name))
    lab.engine.add_request("C", list(range(20)), GREEDY)
    lab.engine.add_request("D", list(range(20)), GREEDY)
    lab.run()
    assert "C20 D20" in lab.batches, "none waits for a snapshot that will not be there"


def test_the_least_recently_used_snapshot_is_taken() -> None:
    lab = state_lab(max_bs=1, spare_states=2)  # three blocks
    prompts = {name: [number, *range(30)] for number, name in enumerate("ABC")}
    params = SamplingParams(max_tokens=1, temperature=0)  # the states of 30 and 31 tokens are kept
    counts = {}
    for number, name in enumerate("AABABCA"):
        serve(lab, f"{name}{number}", prompts[name], params)
        counts[f"{name}{number}"] = computed(lab, f"{name}{number}")
    assert counts == {"A0": 31, "A1": 1, "B2": 31, "A3": 1, "B4": 31, "C5": 31, "A6": 31}


def test_a_row_takes_no_block_that_another_one_reads() -> None:
    """With two blocks of each row all are in use within the plan in which every row begins with a snapshot."""
    lab = state_lab(max_bs=3, spare_states=3)
    for name in "AB":
        serve(lab, name, [ord(name) - 60, *range(30)])
    for number, name in enumerate("ABBAAB"):
        lab.engine.add_request(str(number), [ord(name) - 60, *range(30)], GREEDY)
    lab.run()
    for number, name in enumerate("ABBAAB"):
        assert lab.tokens[str(number)] == lab.expected([ord(name) - 60, *range(30)], GREEDY)


@pytest.mark.parametrize("salted", [False, True])
def test_a_snapshot_of_another_salt_is_not_found(salted: bool) -> None:
    lab = state_lab()
    serve(lab, "A", list(range(20)))
    serve(
        lab,
        "B",
        list(range(20)),
        SamplingParams(max_tokens=9, temperature=0, cache_salt="x" if salted else ""),
    )
    assert computed(lab, "B") == (20 if salted else 1)


def test_new_weights_forget_all_snapshots() -> None:
    lab = state_lab()
    serve(lab, "A", list(range(20)))
    lab.kv.prefixes.forget_all()
    assert lab.engine.stats.state_blocks == (0, 0, 48)
    serve(lab, "B", list(range(20)))
    assert computed(lab, "B") == 20


@pytest.mark.parametrize("page_size", [4, 32])
def test_snapshots_with_nan_are_forgotten(page_size: int) -> None:
    """B begins with the state of A, whose next token is not finite: C finds neither of them, and D finds that of C."""
    lab = state_lab(
        page_size,
        depth=1,
        override=lambda name, length, token: None if (name, length) == ("A", 22) else token,
    )
    prompt = list(range(20))
    lab.engine.add_request("A", prompt, GREEDY)
    lab.step()
    lab.step()
    lab.engine.add_request("B", prompt, GREEDY)
    lab.run()
    assert (lab.ends["A"].finish_reason, lab.ends["B"].finish_reason) == ("error", "length")
    assert computed(lab, "B") == 1
    for name in "CD":
        serve(lab, name, prompt)
    assert [computed(lab, name) for name in "CD"] == [20, 1]


@pytest.mark.usefixtures("dense")
def test_a_request_with_pages_of_nan_leaves_no_snapshot() -> None:
    """B begins as A, whose next token is not finite, and passes a border of states at 24."""
    lab = state_lab(
        depth=1, override=lambda name, length, token: None if (name, length) == ("A", 22) else token
    )
    lab.engine.add_request("A", list(range(20)), GREEDY)
    for _ in range(4):
        lab.step()
    lab.engine.add_request("B", list(range(20)), GREEDY)
    lab.run()
    assert computed(lab, "B") == 4, "from 16 on"
    assert lab.tokens["B"] == lab.expected(range(20), GREEDY)
    assert lab.engine.stats.state_blocks == (0, 0, 48)


@pytest.mark.usefixtures("dense")
def test_the_state_of_an_aborted_request_is_kept() -> None:
    lab = state_lab(depth=1, budget=6)
    lab.engine.add_request("A", list(range(20)), GREEDY)
    lab.step()
    lab.engine.abort("A")
    serve(lab, "B", list(range(20)))
    assert lab.batches[:4] == ["A6-", "B2-", "B6-", "B2-"], (
        "B begins at 6, and has borders at 8 and 16"
    )


def test_a_preempted_request_continues_from_its_state() -> None:
    lab = state_lab(depth=1)
    lab.engine.add_request("A", list(range(20)), GREEDY)
    for _ in range(4):
        lab.step()
    lab.pool.preempt(lab.pool.running["A"])
    lab.run()
    assert lab.batches == ["A19-", *["A1"] * 9], "no token is computed twice"
    assert lab.tokens["A"] == lab.expected(range(20), GREEDY)


def test_no_room_for_a_copy_computes_all() -> None:
    """Each request takes all blocks, so the page in which its snapshot lies must be evicted."""
    lab = state_lab(32, max_bs=1, max_model_len=64, num_pages=2)
    for name, last in (("A", 1), ("B", 2)):
        serve(lab, name, [*range(40), last])
    assert [computed(lab, name) for name in "AB"] == [41, 41]


def test_fewer_blocks_than_rows_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="num_states=3 is less than one block of states for each of 4 rows"
    ):
        KVManager((10,), 4, 4, num_states=3)


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("number", [8, slow(24)])
@pytest.mark.parametrize("kind", PLAIN)
def test_states_follow_in_any_order(kind: str, number: int) -> None:
    """Together more than 10,000 actions in the slow tests, and a third of them in the default run."""
    labs = [play(kind, seed, 60, has_states=True) for seed in range(number)]
    if kind.startswith("chunked"):
        assert any(lab.pool.num_cache_hits for lab in labs) and any(
            lab.pool.num_preemptions for lab in labs
        )
        assert any(member.state.source not in (-1, member.state.target)
                   for lab in labs for plan in lab.executor.plans for member in plan.members)  # fmt: skip


MOVE, KEEP, AT_SNAPSHOT, FREE = (
    States.move,
    PrefixReuse._keep_state,
    PrefixCache._at_snapshot,
    States.free,
)


def _move_without_target(owner: States, row: int) -> StateMove:
    source = owner._live[row]
    move = MOVE(owner, row)
    if source not in (-1, move.target):
        owner._pool.share((source,))
        owner._pool.give_back((move.target,))
        owner._live[row] = source
    return move


class _NewestFirst(BlockPool):
    """Takes the kept block that was used last."""

    def take_blocks(self, count: int) -> list[int]:
        for block in reversed(list(self._kept)[1:]):
            self._kept.move_to_end(block)
        return super().take_blocks(count)


def _longer(cache: PrefixCache, *args: Any) -> Any:
    hit = AT_SNAPSHOT(cache, *args)
    return (
        hit._replace(num_tokens=hit.num_tokens - 1)
        if hit.num_tokens % cache._page_size > 1
        else hit
    )


MUTANTS: dict[str, tuple[str, object, str, Callable[..., Any]]] = {
    "a snapshot is written": (
        "chunked", States, "move", lambda owner, row: (
            MOVE(owner, row) if owner._live[row] == -1 else StateMove(owner._live[row], owner._live[row])
        )
    ),
    "the target of a move is forgotten": ("chunked", States, "move", _move_without_target),
    "a source is taken in the same plan": ("chunked, overlapped", states, "BlockPool", _NewestFirst),
    "a state is kept with too many ids": (
        "chunked, three ahead", PrefixReuse, "_keep_state", lambda reuse, request, row, num_tokens: (
            KEEP(reuse, request, row, min(num_tokens, request.num_tokens))
        )
    ),
    "a hit of another length": ("chunked", PrefixCache, "_at_snapshot", _longer),
    "a hit without its window": (
        "chunked", PrefixCache, "_with_window", lambda cache, group, layers, digests, count, *_: count
    ),
    "any page is copied": (
        "chunked", PrefixCache, "_page_with", lambda cache, parent, begun: (
            cache._following[parent][0][1] if begun and parent in cache._following else b""
        )
    ),
    "a row keeps its state after the end": (
        "orca", States, "free", lambda owner, row: None
    ),
}  # fmt: skip


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(*MUTANTS[mutant], monkeypatch, has_states=True)
