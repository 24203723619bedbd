"""Spans of kept pages: the order of a retention, its faults, and blocks that are never lost."""

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from orca_jax.policy import Keeping, KeptSpan
from orca_jax.policy.retention import MOST_SLOW
from orca_jax.sched.prefixes import spans
from orca_jax.sched.prefixes.retentions import Cost, LruTtl
from orca_jax.values.cache_hints import MOST_WISHES, CacheHints, CacheWish
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Urgency
from tests.retention.lab import ALWAYS, Small, keeping, prompt, random_load

SHAPES: dict[str, dict[str, Any]] = {
    "one group": {},
    "a window": {"windows": (None, 6)},
    "two pools": {"windows": (None, None), "pools": (0, 1)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_equal_worths_give_up_what_lru_gives_up(shape: str, seed: int) -> None:
    ours = Small(keeping(lambda span, now: ALWAYS), **SHAPES[shape])
    plain = Small(**SHAPES[shape])
    for small in (ours, plain):
        random_load(seed, small)
    assert ours.removed.pages == plain.removed.pages
    assert len(plain.removed.pages) > 20
    assert ours.lab.tokens == plain.lab.tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_any_worth_leaves_tokens_and_blocks_whole(shape: str, seed: int) -> None:
    dice = random.Random(f"worth {seed}")
    plain = Small(**SHAPES[shape])
    random_load(seed, plain)
    for retention in (
        keeping(lambda span, now: Keeping(dice.uniform(-1, 1), dice.choice([0.5, 3.0, math.inf]))),
        LruTtl(),
        Cost(),
    ):
        small = Small(retention, **SHAPES[shape])
        random_load(seed, small)
        assert small.lab.tokens == plain.lab.tokens
        assert small.retainer is not None and not small.retainer.fault


def _raises(span: KeptSpan, now: float) -> Keeping:
    raise ValueError("no idea")


def _ends(span: KeptSpan, now: float) -> Keeping:
    raise SystemExit


FAULTS: dict[str, tuple[Callable[[KeptSpan, float], Any], str]] = {
    "raises": (_raises, r"Tried: keep raised ValueError: no idea at line \d+"),
    "ends": (_ends, "Tried: keep raised SystemExit"),
    "no rank": (lambda span, now: 3.0, "Tried: keep returned float instead of a Keeping"),
    "no number": (lambda span, now: Keeping(math.nan), "keep needs a number"),
    "no time": (lambda span, now: Keeping(1.0, 0.0), "seconds above 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_after_a_fault_the_least_recently_used_pages_go(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep, message = FAULTS[name]
    calls = [0]

    def fails(span: KeptSpan, now: float) -> Any:
        calls[0] += 1
        return ALWAYS if calls[0] < 9 else keep(span, now)

    small = Small(keeping(fails))
    plain = Small()
    for each in (small, plain):
        random_load(0, each)
    assert small.removed.pages == plain.removed.pages
    assert small.lab.tokens == plain.lab.tokens
    (record,) = [each for each in caplog.records if each.name == spans.__name__]
    assert calls[0] == 9
    assert record.levelname == "ERROR"
    assert re.search(message, record.getMessage())


def test_a_retention_that_refuses_all_gives_up_the_oldest() -> None:
    small = Small(keeping(lambda span, now: Keeping(math.inf)))
    for number in range(9):
        small.answer(prompt(number))
    assert small.answer(prompt(0)) == 0 < small.answer(prompt(8))


def test_a_slow_class_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10_000))
    retention = keeping(lambda span, now: ALWAYS)
    retention._clock = lambda: float(next(times))
    small = Small(retention)
    random_load(1, small)
    assert small.retainer is not None
    assert small.retainer.fault == "Tried: 16 calls took more than 10 ms"


def test_few_slow_calls_among_many_are_no_fault() -> None:
    times = iter(range(10_000_000))
    retention = keeping(lambda span, now: ALWAYS)
    retention._clock = lambda: 0.02 * (next(times) // 100)
    small = Small(retention)
    for seed in range(20):
        random_load(seed, small)
    assert next(times) > 2 * 100 * MOST_SLOW, "more slow calls than the limit"
    assert small.retainer is not None and not small.retainer.fault


def test_the_facts_of_a_span() -> None:
    seen: list[KeptSpan] = []

    def keep(span: KeptSpan, now: float) -> Keeping:
        seen.append(span)
        return ALWAYS

    used: list[KeptSpan] = []
    small = Small(keeping(keep, used=lambda span, now: used.append(span)), num_pages=24)
    wishes = (CacheWish(0, 8, ttl=60.0), CacheWish(8, 12, priority=0))
    hints = CacheHints("talk", wishes=wishes)
    small.answer(prompt(3, 18), hints=hints, urgency=Urgency(tenant="me", program="p"))
    # from the end to the begin: the last page, the one of no use, and the first two with a time
    assert [(span.start, span.num_tokens) for span in seen] == [(12, 8), (8, 4), (0, 8)]
    assert [(span.ttl, span.priority) for span in seen] == [(None, 50), (None, 0), (60.0, 50)]
    assert {(span.tenant, span.session, span.hits, span.group) for span in seen} == {
        ("me", "talk", 0, 0)
    }
    seen.clear()
    small.answer([*prompt(3, 8), 1, 2, 3], urgency=Urgency(tenant="you", program="q"))
    assert [span.start for span in used] == [0]
    assert [(span.start, span.hits, span.is_shared) for span in seen][-1] == (0, 1, True)
    assert seen[0].hits == 0 and seen[0].session == "q"


def test_a_time_to_live_is_a_wish() -> None:
    small = Small(LruTtl())
    hints = CacheHints(wishes=(CacheWish(ttl=30.0),))
    small.answer(prompt(0), hints=hints)
    for number in range(1, 4):
        small.answer(prompt(number))
    assert small.answer(prompt(0)) > 0, "it is kept"
    small.lab.now += 100.0
    for number in range(4, 8):
        small.answer(prompt(number))
    assert small.answer(prompt(0)) == 0, "its time is over"
    for number in range(8, 16):
        small.answer(prompt(number), hints=hints)
    assert small.answer(prompt(15)) > 0 == small.answer(prompt(8)), "all have a wish: LRU decides"


def test_the_pages_of_an_ended_session_go_first() -> None:
    small = Small(LruTtl())
    talk = Urgency(program="talk")
    small.answer(prompt(0))
    small.answer(prompt(1), hints=CacheHints("talk"))
    small.answer([9, 9, 9], hints=CacheHints("talk", ends=True), urgency=Urgency(tenant="other"))
    small.answer(prompt(2))
    assert small.answer(prompt(1), urgency=talk) > 0, "the session of another tenant has ended"
    small.answer([9, 9, 9], hints=CacheHints("talk", ends=True))
    small.answer(prompt(3))
    assert small.answer(prompt(1)) == 0 < small.answer(prompt(2))


def test_no_session_ends_what_others_share() -> None:
    seen: list[KeptSpan] = []

    def keep(span: KeptSpan, now: float) -> Keeping:
        seen.append(span)
        return ALWAYS

    small = Small(keeping(keep), num_pages=24)
    small.answer([*prompt(0), 1], hints=CacheHints("one"))
    small.answer([*prompt(0), 2], hints=CacheHints("two"))
    seen.clear()
    over = CacheHints("two", ends=True, wishes=(CacheWish(priority=0),))
    small.answer([*prompt(0), 2, 3, 4, 5, 6], hints=over)
    small.answer(prompt(1, 36))
    small.answer(prompt(2, 36))
    shared = [span for span in seen if span.is_shared]
    own = [span for span in seen if not span.is_shared and span.session == "two"]
    assert shared and {(span.priority, span.has_ended) for span in shared} == {(50, False)}
    assert any(span.priority == 0 for span in own) and any(span.has_ended for span in own)


def test_cost_keeps_what_is_used_again() -> None:
    """Prompts that come once fill the cache between the uses of one that comes often."""
    found = []
    for retention in (Cost(), None):
        small = Small(retention)
        number = 1
        for _ in range(12):
            small.answer([*prompt(0), 8])
            small.answer([*prompt(0), 8])
            for _ in range(4):
                small.answer(prompt(number))
                number = number % 49 + 1
        found.append(small.answer([*prompt(0), 9]))
    assert found[0] >= 16 > found[1]


def test_the_table_stays_small() -> None:
    small = Small(keeping(lambda span, now: Keeping(now, 1.0)), num_pages=24)
    for _ in range(4):
        random_load(2, small)
    (pool,) = small.lab.kv._pools
    assert pool.spans is not None
    most = 2 * pool.num_blocks + spans._SPARE
    assert len(pool.spans._by_worth) <= most and len(pool.spans._by_time) <= most
    assert len(pool.spans._of_session) <= pool.num_blocks


def test_the_written_tokens_of_a_prompt() -> None:
    small = Small()
    lab = small.lab
    written = []
    for text in (prompt(0, 18), prompt(0, 18), prompt(0, 10) + [5] * 9):
        small.submit(text, 3)
        while lab.engine.has_work:
            written += [update.num_written for update in lab.step() if update.num_written]
    assert written[0] == 18, "17 are computed by pages, and the last one of the prompt"
    assert sum(written) == 18 + 11, "the third one shares two pages, and the second one all"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start": -1}, "start must be at least 0"),
        ({"start": 4, "end": 4}, "end must be after start"),
        ({"ttl": math.nan}, "ttl must be from 0 to 86400 seconds, got nan"),
        ({"priority": 101}, "priority must be from 0 to 100"),
    ],
)
def test_a_wish_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CacheWish(**values)


def test_many_wishes_are_refused() -> None:
    with pytest.raises(RequestError, match=f"wishes must be at most {MOST_WISHES}"):
        CacheHints(wishes=(CacheWish(),) * (MOST_WISHES + 1))
