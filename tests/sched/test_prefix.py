"""Hits of the prefix cache, counted in computed tokens: inside of a page, of running requests, and with windows."""

from collections.abc import Sequence
from itertools import product

import pytest

from orca_jax.sched.blocks import BlockPool
from orca_jax.sched.prefixes.cache import WORTH_A_COPY, Hit, Page, PrefixCache
from orca_jax.sched.request import id_bytes, page_digest
from orca_jax.values.cache_spec import NO_BLOCK, LayerGroup
from orca_jax.values.request import SamplingParams
from tests.covering import covering
from tests.sched.lab import Lab, Shape, groups_of
from tests.sched.test_groups import GROUPS

GREEDY = SamplingParams(max_tokens=9, temperature=0)
SIZES = [1, 4, 16, 32, 128]


def chat_lab(
    page_size: int, *, groups: str = "full alone", depth: int = 2, budget: int = 64, max_bs: int = 8
) -> Lab:
    shape = Shape(budget=budget, depth=depth)
    return Lab(
        max_bs=max_bs, page_size=page_size, max_model_len=512, groups=GROUPS[groups], shape=shape
    )


def computed(lab: Lab, request_id: str) -> int:
    """Tokens of a request in plans before its first sampled one, and in that one."""
    total = 0
    for plan in lab.executor.plans:
        for member in plan.members:
            if member.request_id == request_id:
                total += member.num_tokens
                if member.is_sampling:
                    return total
    return total


def serve(
    lab: Lab, request_id: str, prompt: Sequence[int], params: SamplingParams = GREEDY
) -> list[int]:
    lab.engine.add_request(request_id, prompt, params)
    lab.run()
    assert lab.tokens[request_id] == lab.expected(prompt, params)
    return [*prompt, *lab.tokens[request_id]]


@pytest.mark.parametrize("groups", ["full alone", "windows of two sizes", "two pools"])
@pytest.mark.parametrize("page_size", SIZES)
def test_a_turn_of_a_chat_computes_its_new_tokens_and_the_last_sampled_one(
    page_size: int, groups: str
) -> None:
    lab = chat_lab(page_size, groups=groups)
    text = serve(lab, "0", [number % 61 for number in range(50)])
    for turn in range(1, 5):
        num_kept = len(text) - 1  # the last sampled token was not computed
        if num_kept % page_size < WORTH_A_COPY:
            num_kept -= num_kept % page_size
        text = serve(lab, str(turn), [*text, *range(10 * turn, 10 * turn + 10 + turn)])
        assert computed(lab, str(turn)) == len(text) - 9 - num_kept


@pytest.mark.parametrize(
    ("page_size", "num_prompt", "groups"),
    covering(
        product(
            SIZES,
            (2, 20, 128),
            ("full alone", "windows of two sizes", "two pools", "windows alone"),
        )
    ),
)
def test_the_same_prompt_again_computes_one_token(
    page_size: int, num_prompt: int, groups: str
) -> None:
    lab = chat_lab(page_size, groups=groups)
    prompt = [number % 59 for number in range(num_prompt)]
    for request_id in "AB":
        serve(lab, request_id, prompt)
    assert [computed(lab, request_id) for request_id in "AB"] == [num_prompt, 1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [2, 50, 130])
@pytest.mark.parametrize("page_size", SIZES)
def test_further_samples_compute_one_token(page_size: int, num_prompt: int, depth: int) -> None:
    """Also while the first sample is still running, with a prompt of several chunks."""
    lab = chat_lab(page_size, depth=depth)
    prompt = [number % 59 for number in range(num_prompt)]
    for seed in range(6):
        lab.engine.add_request(str(seed), prompt, SamplingParams(max_tokens=9, seed=seed))
    lab.run()
    assert [computed(lab, str(seed)) for seed in range(6)] == [num_prompt, 1, 1, 1, 1, 1]
    running = next(
        plan for plan in lab.executor.plans if "1" in {member.request_id for member in plan.members}
    )
    assert len(running.members) == 6, (
        "all begin together, when the prompt of the first one is computed"
    )
    for seed in range(6):
        assert lab.tokens[str(seed)] == lab.expected(
            prompt, SamplingParams(max_tokens=9, seed=seed)
        )


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_a_template_that_drops_the_thinking_computes_from_there_on(page_size: int) -> None:
    lab = chat_lab(page_size)
    asked = [number % 61 for number in range(40)]
    text = serve(lab, "A", asked, SamplingParams(max_tokens=60, temperature=0))
    thinking, answer = text[40:80], text[80:]
    assert thinking[0] != answer[0], "else one more token is equal"
    prompt = [*asked, *answer, *range(8)]
    serve(lab, "B", prompt)
    kept = 40 if 40 % page_size >= WORTH_A_COPY else 40 // page_size * page_size
    assert computed(lab, "B") == len(prompt) - kept


def test_another_request_is_admitted_while_a_sample_waits() -> None:
    lab = chat_lab(4, depth=1, budget=8)
    for request_id, prompt in (("A", range(20)), ("B", range(20)), ("C", [5])):
        lab.engine.add_request(request_id, list(prompt), GREEDY)
    lab.run()
    assert lab.batches[:4] == ["A8-", "A8-", "A4 C1", "A1 C1 B1"]


def test_a_sample_begins_itself_if_the_first_one_is_aborted() -> None:
    lab = chat_lab(4, depth=1, budget=8)
    for request_id in "AB":
        lab.engine.add_request(request_id, list(range(20)), GREEDY)
    lab.step()
    lab.engine.abort("A")
    lab.run()
    assert lab.batches[:4] == ["A8-", "B8-", "B4", "B1"], "it has two pages of the first one"
    assert lab.tokens["B"] == lab.expected(range(20), GREEDY)


def test_no_copy_that_saves_little() -> None:
    lab = chat_lab(32)
    serve(lab, "A", [*range(14), 60])
    for name, num_common, saved in (("B", 15, 0), ("C", 16, 16)):
        serve(lab, name, [*range(num_common - 1), 50, 51, 52])
        serve(lab, f"{name}2", [*range(num_common - 1), 50, 53, 54])
        assert computed(lab, f"{name}2") == num_common + 2 - saved


def test_a_source_without_room_is_not_held() -> None:
    """Each request takes all blocks. The page of the one before could be copied, and must be evicted instead."""
    lab = Lab(max_bs=1, page_size=32, max_model_len=64, shape=Shape(budget=64, num_pages=2))
    for name, last in (("A", 1), ("B", 2), ("C", 3)):
        serve(lab, name, [*range(40), last])
    assert [computed(lab, name) for name in "ABC"] == [41, 9, 9], "one full page"


class _Cache:
    """A prefix cache of pages of two ids, with a pool of ten blocks."""

    def __init__(self, *windows: int | None) -> None:
        self.groups: tuple[LayerGroup, ...] = groups_of(*windows)
        self.pool = BlockPool(10, lambda name: self.cache.taken(name))
        self.cache = PrefixCache([self.pool] * len(self.groups), self.groups, 2)
        self.digests: list[bytes] = []

    def store(self, number: int, *, missing: Sequence[int] = ()) -> list[int]:
        """Keep the next page with the ids (number, number), without the blocks of some groups."""
        parent = self.digests[-1] if self.digests else b"start"
        ids = id_bytes([number, number])
        self.digests.append(page_digest(parent, ids))
        blocks = [
            NO_BLOCK if group in missing else self.pool.take_blocks(1)[0]
            for group in range(len(self.groups))
        ]
        self.cache.remember(
            blocks, Page(self.digests[-1], parent, ids, frozenset((self.digests[0],)))
        )
        self.pool.give_back([block for block in blocks if block != NO_BLOCK])
        self.cache.check_integrity()
        return blocks

    def find(self) -> Hit:
        return self.cache.find(self.digests, b"start", 2 * len(self.digests), lambda start: b"")


def test_a_hit_needs_a_window_of_pages_only() -> None:
    cache = _Cache(None, 4)
    blocks = [cache.store(number, missing=[1] if number < 2 else []) for number in range(4)]
    hit = cache.find()
    assert hit.num_tokens == 8 and list(hit.blocks[0]) == [each[0] for each in blocks]
    assert list(hit.blocks[1]) == [NO_BLOCK, NO_BLOCK, blocks[2][1], blocks[3][1]], (
        "3 tokens before position 8"
    )


@pytest.mark.parametrize(
    ("windows", "missing", "num_tokens"),
    [
        ((None, 4), {3: [1]}, 6),  # pages 1 and 2 are there
        ((None, 4), {2: [1]}, 4),
        ((None, 4), {1: [1], 3: [1]}, 2),  # a window of page 0 alone: it is the beginning
        ((None, 4), {0: [0]}, 0),
        ((4, 4), {3: [0], 1: [1]}, 2),  # each group shortens what the other one has
        ((3, 7), {0: [0, 1]}, 8),  # three tokens before position 8 for the one, six for the other
        ((3, 8), {0: [0, 1]}, 0),  # the other one needs position 1
    ],
)
def test_windows_shorten_a_hit(
    windows: tuple[int | None, ...], missing: dict[int, list[int]], num_tokens: int
) -> None:
    cache = _Cache(*windows)
    for number in range(4):
        cache.store(number, missing=missing.get(number, []))
    assert cache.find().num_tokens == num_tokens


def test_blocks_behind_a_window_are_evicted_first() -> None:
    pool = BlockPool(4, lambda name: evicted.append(name[1]))
    evicted: list[bytes] = []
    for block in pool.take_blocks(4):
        pool.give_name(block, (0, bytes([block])))
    pool.give_back([0, 1])
    pool.give_back([2, 3], is_behind=True)
    pool.take_blocks(3)
    assert evicted == [b"\x03", b"\x02", b"\x01"]


def test_rows_leave_blocks_that_can_be_found() -> None:
    """A chunk is larger than the window: its blocks enter the cache before they leave, and are taken first."""
    lab = Lab(max_bs=2, page_size=4, groups=groups_of(3), shape=Shape(budget=16, depth=2))
    lab.engine.add_request("A", list(range(40)), GREEDY)
    lab.run()
    assert len(lab.kv.prefixes._pages) == 12, "every page"
    lab.engine.add_request("B", [*range(22), 60], GREEDY)
    lab.run()
    assert computed(lab, "B") == 1, "it copies the page after five full ones"
    assert lab.tokens["B"] == lab.expected([*range(22), 60], GREEDY)


@pytest.mark.parametrize("salted", [False, True])
def test_a_page_of_another_salt_is_not_copied(salted: bool) -> None:
    lab = chat_lab(32)
    serve(lab, "A", list(range(20)))
    params = SamplingParams(max_tokens=9, temperature=0, cache_salt="other" if salted else "")
    serve(lab, "B", list(range(20)), params)
    assert computed(lab, "B") == (20 if salted else 1)


def test_a_copy_of_a_page_with_nan_is_forgotten() -> None:
    """B copies the only page of A, whose next token is not finite: what B leaves is not found by C."""
    lab = Lab(
        max_bs=2, page_size=32, shape=Shape(budget=32, depth=1),
        override=lambda name, length, token: None if (name, length) == ("A", 22) else token,
    )  # fmt: skip
    prompt = list(range(20))
    lab.engine.add_request("A", prompt, GREEDY)
    lab.step()
    lab.engine.add_request("B", prompt, GREEDY)
    lab.run()
    assert (lab.ends["A"].finish_reason, lab.ends["B"].finish_reason) == ("error", "length")
    assert computed(lab, "B") == 1
    serve(lab, "C", prompt)
    assert computed(lab, "C") == 20
