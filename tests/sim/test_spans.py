"""Prompts with vector spans on the toy: other vectors share no page, and tokens do not depend on the schedule."""

from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import strategies as st

from orca_jax.cluster.messages import Iteration, decode_call, encode
from orca_jax.sched import request
from orca_jax.sched.prefixes import cache as prefix
from orca_jax.sched.prefixes.cache import WORTH_A_COPY
from orca_jax.sched.request import Request
from orca_jax.sim.toy import ToyExecutor
from orca_jax.sim.toy_memory import toy_span
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import SpannedPrompt, VectorSpan, spans_of
from tests.policy.test_policies import Base, lab_of
from tests.run.examples import holds_for
from tests.sched.lab import VOCAB, Lab, Shape
from tests.sched.test_groups import KINDS, check_found, play
from tests.sched.test_prefix import GREEDY, SIZES, chat_lab, computed, serve
from tests.sched.test_states import PLAIN

Token = tuple[int, int, bytes, int]
"""What a token follows from: its id; in a span also its place there, the digest and the length."""


def spanned(ids: Sequence[int], *spans: VectorSpan) -> SpannedPrompt:
    return SpannedPrompt(tuple(ids), spans)


def tokens_of(prompt: Sequence[int]) -> list[Token]:
    tokens: list[Token] = [(token, 0, b"", 0) for token in prompt]
    for span in spans_of(prompt):
        for at in range(span.place, span.end):
            tokens[at] = prompt[at], at - span.place, span.digest, span.length
    return tokens


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(tokens_of(one), tokens_of(other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@st.composite
def prompts(draw: st.DrawFn) -> Sequence[int]:
    """Prompts of a few ids, contents and places, so that long beginnings are equal."""
    ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
    spans: list[VectorSpan] = []
    place = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.sampled_from([1, 2, 17]))
        if place + length > len(ids):
            break
        first = draw(st.sampled_from([3, 20]))
        spans.append(toy_span(place, length, draw(st.sampled_from("ab")), first))
        place += length + draw(st.integers(0, 3))
    if not spans:
        return ids
    return spanned(ids, *spans)


def live(prompt: Sequence[int]) -> Request:
    own = prompt if isinstance(prompt, SpannedPrompt) else list(prompt)
    return Request("r", own, GREEDY, 0.0, 0, 0, frozenset())


@holds_for(800, one=prompts(), other=prompts(), page_size=st.integers(1, 9))
def test_digests_are_equal_as_far_as_tokens_and_vectors_are(
    one: Sequence[int], other: Sequence[int], page_size: int
) -> None:
    most = min(len(one), len(other)) // page_size
    pairs = zip(
        live(one).digests(page_size, most), live(other).digests(page_size, most), strict=True
    )
    found = [mine == theirs for mine, theirs in pairs]
    num_equal = num_common(one, other) // page_size
    assert found == [True] * min(num_equal, most) + [False] * (most - num_equal)


@holds_for(400, one=prompts(), other=prompts())
def test_contents_of_a_page_have_the_common_tokens_of_their_codes(
    one: Sequence[int], other: Sequence[int]
) -> None:
    contents = request.id_bytes(one), request.id_bytes(other)
    assert prefix._num_common(*contents) == num_common(one, other)
    assert (contents[0] == contents[1]) == (tokens_of(one) == tokens_of(other))


@holds_for(400, prompt=prompts(), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_parts_of_a_prompt_have_its_tokens(prompt: Sequence[int], cuts: list[int]) -> None:
    """A part begins with a negative place inside of a span, and ends within another one."""
    borders = [0, *sorted(min(cut, len(prompt)) for cut in cuts), len(prompt)]
    whole = tokens_of(prompt)
    for start, stop in pairwise(borders):
        part = live(prompt).ids_from(start, stop - start)
        assert list(part) == list(prompt)[start:stop]
        for span in spans_of(part):
            assert span.place < len(part) and span.end > 0, "it touches the part"
            for at in range(max(0, span.place), min(span.end, len(part))):
                assert whole[start + at][1:] == (at - span.place, span.digest, span.length)
        num_spanned = sum(min(span.end, len(part)) - max(0, span.place) for span in spans_of(part))
        assert num_spanned == sum(bool(token[2]) for token in whole[start:stop])


@pytest.mark.parametrize("groups", ["full alone", "windows of two sizes", "two pools"])
@pytest.mark.parametrize("page_size", SIZES)
def test_pages_are_shared_by_digest_and_not_by_ids(page_size: int, groups: str) -> None:
    """40 tokens, 20 of them vectors. The key is that of an upload, and names nothing that matters."""
    lab = chat_lab(page_size, groups=groups)
    ids = range(40)
    serve(lab, "A", spanned(ids, toy_span(17, 20, "a", 5)))
    serve(lab, "same", spanned(ids, toy_span(17, 20, "b", 5)))
    assert computed(lab, "same") == 1, "equal digests, and another key"
    in_page = 17 % page_size
    kept = 17 if in_page >= WORTH_A_COPY else 17 - in_page
    others = {
        "other": spanned(ids, toy_span(17, 20, "a", 6)),
        "shorter": spanned(ids, toy_span(17, 19, "a", 5)),
        "plain": list(ids),
    }
    for name, prompt in others.items():
        serve(lab, name, prompt)
        assert computed(lab, name) == 40 - kept, name


@pytest.mark.parametrize("page_size", SIZES)
def test_a_prompt_waits_for_one_with_equal_vectors_alone(page_size: int) -> None:
    """A is running when the others come: the same prompt waits for its pages, and another one does not."""
    lab = chat_lab(page_size, depth=1)
    for name, first in (("A", 5), ("same", 5), ("other", 6)):
        prompt = spanned(range(30), toy_span(0, 12, name, first))
        lab.engine.add_request(name, prompt, GREEDY)
    lab.run()
    assert lab.batches[:2] == ["A30 other30", "A1 other1 same1"]


@pytest.mark.parametrize("page_size", [32, 128])
def test_a_hit_inside_a_page_ends_before_other_vectors_or_after_equal_ones(page_size: int) -> None:
    """The page has two spans: the second one differs, or the text after both does."""
    lab = chat_lab(page_size)
    ids = list(range(31))
    first = toy_span(2, 10, "a", 5)
    serve(lab, "A", spanned(ids, first, toy_span(20, 3, "a", 9)))
    serve(lab, "B", spanned(ids, first, toy_span(20, 3, "a", 7)))
    assert computed(lab, "B") == 31 - 20
    serve(lab, "C", spanned([*ids[:27], 60, 60, 60, 60], first, toy_span(20, 3, "b", 7)))
    assert computed(lab, "C") == 31 - 27
    serve(lab, "D", spanned(ids, toy_span(2, 10, "a", 6), toy_span(20, 3, "a", 7)))
    assert computed(lab, "D") == 31, "two tokens before the first span are not worth a copy"


def test_a_hit_may_end_within_a_span() -> None:
    """A leaves after 19 of its 30 tokens, within a span from 10 to 28: B begins with two pages of A and a copy."""
    lab = chat_lab(8, budget=19, depth=1)
    prompt = spanned(range(30), toy_span(10, 18, "a", 5))
    lab.engine.add_request("A", prompt, GREEDY)
    lab.step()
    lab.engine.abort("A")
    lab.run()
    serve(lab, "B", spanned(range(30), toy_span(10, 18, "b", 5)))
    assert computed(lab, "B") == 30 - 16, "three more tokens are not worth a copy"
    members = [plan.members[0] for plan in lab.executor.plans if plan.members[0].request_id == "B"]
    assert members[0].start == 16 and spans_of(members[0].ids)[0].place == -6


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_chunks_end_within_a_span(budget: int) -> None:
    lab = chat_lab(4, budget=budget, depth=2)
    prompt = spanned(range(30), toy_span(5, 11, "a", 5), toy_span(16, 9, "a", 30))
    serve(lab, "A", prompt)
    places = [
        (span.place, span.length)
        for plan in lab.executor.plans
        for member in plan.members
        for span in spans_of(member.ids)
    ]
    assert any(place < 0 for place, _ in places), "begins within a span"
    assert {length for _, length in places} == {11, 9}, "a span keeps its length"


def test_preemption_computes_the_vectors_again() -> None:
    """Two requests of 11 pages in 15: the later one loses its pages, and both have their own tokens at the end."""
    lab = Lab(max_bs=2, page_size=4, shape=Shape(budget=8, num_pages=15, reuses_prefixes=False))
    params = SamplingParams(max_tokens=16, temperature=0)
    asked = {
        name: spanned(range(26), toy_span(3, 20, name, first))
        for name, first in (("A", 5), ("B", 9))
    }
    for name, prompt in asked.items():
        lab.engine.add_request(name, prompt, params)
    lab.run()
    assert lab.pool.num_preemptions > 0
    assert lab.tokens == {name: lab.expected(prompt, params) for name, prompt in asked.items()}
    assert lab.tokens["A"] != lab.tokens["B"]


FAMILIES = [(kind, False) for kind in KINDS] + [(kind, True) for kind in PLAIN]
"""Schedules, and True for a toy with recurrent states. Each has groups of layers with and without windows."""


@pytest.mark.parametrize(("kind", "has_states"), FAMILIES)
def test_tokens_are_the_same_under_every_schedule(kind: str, has_states: bool) -> None:
    """Hits, preemption, aborts, chunks, stages and groups with windows, in any order."""
    labs = [play(kind, seed, 60, has_states, has_spans=True) for seed in range(8)]
    spans = [
        span
        for lab in labs
        for plan in lab.executor.plans
        for member in plan.members
        for span in spans_of(member.ids)
    ]
    assert spans, "no prompt with spans has run"
    if kind.startswith("chunked"):
        assert any(span.place < 0 for span in spans), "no plan begins within a span"
        assert any(lab.pool.num_cache_hits for lab in labs)
        assert any(lab.pool.num_preemptions for lab in labs)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "has_states"), FAMILIES)
def test_tokens_are_the_same_in_a_thousand_orders(kind: str, has_states: bool) -> None:
    for seed in range(100, 160):
        play(kind, seed, 60, has_states, has_spans=True)


def test_a_policy_from_outside_shares_by_digest() -> None:
    lab = lab_of(Base(), budget=40, reuses_prefixes=True)
    prompts = {
        name: spanned(range(30), toy_span(9, 15, name, first))
        for name, first in (("A", 5), ("same", 5), ("other", 6))
    }
    for name, prompt in prompts.items():
        serve(lab, name, prompt)
    assert [computed(lab, name) for name in prompts] == [30, 1, 30 - 8]


def _cut_anew(prompt: SpannedPrompt, index: int | slice) -> Any:
    """A part in which a span that begins before it begins anew."""
    part = SLICED(prompt, index)
    if not isinstance(part, SpannedPrompt):
        return part
    spans = tuple(span._replace(place=max(0, span.place)) for span in part.spans)
    return SpannedPrompt(part.ids, spans)


SLICED = SpannedPrompt.__getitem__

MUTANTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "digests of ids alone": (request, "with_spans", lambda ids, spans: ids),
    "a cut span begins anew": (SpannedPrompt, "__getitem__", _cut_anew),
    "a resumed request loses its spans": (
        SpannedPrompt,
        "__add__",
        lambda prompt, ids: [*prompt.ids, *ids],
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found("chunked", *MUTANTS[mutant], monkeypatch, has_spans=True)


@pytest.mark.parametrize("kind", ["chunked", "orca"])
def test_workers_get_the_spans_of_a_plan(kind: str) -> None:
    """An executor behind the messages of a cluster draws the tokens of the leader's."""
    lab = chat_lab(8, budget=9, depth=1) if kind == "chunked" else Lab(n_slots=200)
    for number, place in enumerate((0, 7, 15)):
        lab.engine.add_request(
            str(number), spanned(range(30), toy_span(place, 12, "a", number)), GREEDY
        )
    lab.run()
    sizes = VOCAB, lab.kv.num_blocks, lab.kv.page_size, lab.kv.num_rows
    worker = ToyExecutor(*sizes, groups=lab.kv.groups)
    drawn: dict[str, list[int]] = {}
    for plan in lab.executor.plans:
        call = decode_call(encode(Iteration(plan, 0)))
        assert isinstance(call, Iteration)
        result = worker.collect(worker.submit(call.plan))
        for member, each in zip(plan.members, result.members, strict=True):
            drawn.setdefault(member.request_id, []).extend(each.run)
    assert drawn == lab.tokens
    assert len({tuple(tokens) for tokens in drawn.values()}) == 3


SPAN = toy_span(2, 3, "a", 5)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([SPAN._replace(place=-1)], "3 tokens from position -1 on is not within .* 0 to 8"),
        ([SPAN._replace(place=6)], "3 tokens from position 6 on"),
        ([SPAN._replace(length=0)], "0 tokens from position 2"),
        ([SPAN, SPAN._replace(place=4)], "from position 4 on is not within .* 5 to 8"),
        ([SPAN._replace(place=5), SPAN], "from position 2 on is not within .* 8 to 8"),
        ([SPAN._replace(digest=b"short")], "32 bytes, not 5"),
    ],
)
def test_wrong_spans_are_refused(spans: list[VectorSpan], message: str) -> None:
    lab = Lab()
    with pytest.raises(RequestError, match=message) as caught:
        lab.engine.add_request("A", spanned(range(8), *spans), GREEDY)
    assert caught.value.param == "prompt" and not len(lab.pool)


def test_vectors_have_no_log_probabilities() -> None:
    lab = Lab()
    with pytest.raises(RequestError, match="a vector has no probability") as caught:
        lab.engine.add_request("A", spanned(range(8), SPAN), SamplingParams(prompt_logprobs=1))
    assert caught.value.param == "prompt_logprobs"


def test_a_caller_may_change_its_lists_later() -> None:
    lab = Lab()
    ids = list(range(8))
    lab.engine.add_request("A", SpannedPrompt(ids, [SPAN]), GREEDY)  # type: ignore[arg-type]
    ids[0] = 9
    lab.run()
    assert lab.tokens["A"] == lab.expected(spanned(range(8), SPAN), GREEDY)
