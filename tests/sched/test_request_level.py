"""Request-level scheduling by table: the costs of the paper's baseline."""

from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab


def lab_of(max_bs: int = 2, **settings: int) -> Lab:
    return Lab("request_level", max_bs=max_bs, **settings)


def test_early_finished_and_late_joining() -> None:
    """The paper's Figure 3: B ends after two iterations, is still computed, and returns with A; C waits for both."""
    lab = lab_of()
    lab.add("A", 2, 4)
    lab.add("B", 2, 2)
    lab.step()
    lab.add("C", 3, 2)
    lab.run()
    assert lab.batches == ["A2 B2", "A1 B1", "A1 B1-", "A1 B1-", "C3", "C1"]
    assert lab.returned == ["", "", "", "AB", "", "C"]


def test_longer_prompts_are_forced_token_by_token() -> None:
    """Section 6.2: the first iteration takes the shortest input; A generates while B's prompt is forced by tokens."""
    lab = lab_of()
    lab.add("A", 2, 3)
    lab.add("B", 5, 2)
    lab.run()
    assert lab.batches == ["A2 B2-", "A1 B1-", "A1 B1-", "A1- B1", "A1- B1"]
    starts = [[member.start for member in plan.members] for plan in lab.executor.plans]
    assert starts == [[0, 0], [2, 2], [3, 3], [3, 4], [3, 5]], (
        "A repeats its last token where it stood"
    )
    assert lab.returned == ["", "", "", "", "AB"]


def test_three_lengths() -> None:
    lab = lab_of(max_bs=3)
    lab.add("A", 4, 1)
    lab.add("B", 1, 2)
    lab.add("C", 3, 2)
    lab.run()
    assert lab.batches == ["A1- B1 C1-", "A1- B1 C1-", "A1- B1- C1", "A1 B1- C1"]


def test_no_token_is_delivered_before_the_batch_ends() -> None:
    lab = lab_of()
    lab.add("A", 1, 1)
    lab.add("B", 1, 3)
    assert [len(lab.step()) for _ in range(3)] == [0, 0, 2]
    assert [len(tokens) for tokens in lab.tokens.values()] == [1, 3]


def test_repeating_needs_no_pages() -> None:
    """A fills its page exactly; kept for four more iterations, it must not take another."""
    lab = lab_of(page_size=4)
    lab.add("A", 2, 2)
    lab.add("B", 2, 6)
    lab.run()
    pages = [
        [sum(map(len, member.new_blocks)) for member in plan.members] for plan in lab.executor.plans
    ]
    assert pages == [[1, 1], [0, 0], [0, 0], [0, 1], [0, 0], [0, 0]]


def test_the_batch_is_bounded_by_slots() -> None:
    lab = lab_of(max_bs=4, n_slots=10)
    lab.add("A", 2, 2)
    lab.add("B", 3, 3)
    lab.add("C", 1, 1)
    lab.run()
    assert lab.batches == ["A2 B2-", "A1 B1", "A1- B1", "A1- B1", "C1"]


def test_the_batch_is_bounded_by_max_bs() -> None:
    lab = lab_of(max_bs=2)
    for request_id in "ABC":
        lab.add(request_id, 1, 1)
    lab.run()
    assert lab.batches == ["A1 B1", "C1"]


def test_aborted_members_leave_at_once() -> None:
    lab = lab_of()
    lab.add("A", 2, 2)
    lab.add("B", 2, 5)
    lab.step()
    assert lab.engine.abort("A")
    lab.step()
    assert lab.batches == ["A2 B2", "B1"]
    assert lab.ends["A"].finish_reason == "abort"
    assert lab.tokens["A"] == []
    lab.run()


def test_when_the_longest_member_is_aborted_the_others_return() -> None:
    """B has ended and is kept only for A: without A there is no iteration to run."""
    lab = lab_of()
    lab.add("A", 2, 9)
    lab.add("B", 2, 1)
    lab.add("C", 2, 1)
    lab.step()
    lab.engine.abort("A")
    lab.step()
    assert {end: lab.ends[end].finish_reason for end in lab.ends} == {"A": "abort", "B": "length"}
    lab.run()
    assert lab.batches == ["A2 B2", "C2"]


def test_an_ended_member_may_still_be_aborted() -> None:
    lab = lab_of()
    lab.add("A", 2, 1)
    lab.add("B", 2, 3)
    lab.step()
    lab.engine.abort("A")
    lab.run()
    assert lab.ends["A"].finish_reason == "abort"
    assert lab.tokens["A"] == []
    assert lab.batches == ["A2 B2", "B1", "B1"]


def test_figure_8_microbatches() -> None:
    """A batch of four, cut in two; both microbatches run until C has ended, and only then E begins."""
    lab = lab_of(max_bs=4, n_workers=2)
    for request_id, max_tokens in (("A", 1), ("B", 2), ("C", 3), ("D", 1), ("E", 1)):
        lab.add(request_id, 2, max_tokens)
    lab.run()
    assert lab.batches == [
        "A2 B2",
        "C2 D2",
        "A1- B1",
        "C1 D1-",
        "A1- B1-",
        "C1 D1-",
        "A1- B1-",
        "E2",
    ]
    assert [ended for ended in lab.returned if ended] == ["ABCD", "E"]


def test_an_aborted_microbatch_leaves_the_others() -> None:
    lab = lab_of(max_bs=2, n_workers=2)
    lab.add("A", 2, 3)
    lab.add("B", 2, 3)
    lab.step()
    lab.engine.abort("A")
    lab.run()
    assert lab.batches == ["A2", "B2", "B1", "B1"]
    assert {end: lab.ends[end].finish_reason for end in lab.ends} == {"A": "abort", "B": "length"}


def test_microbatches_of_a_fixed_size() -> None:
    """FasterTransformer's mbs: two members are one microbatch of two, and not two of one."""
    pool = lab_of(max_bs=4).pool
    for name in "AB":
        pool.add_request(name, [1, 2], SamplingParams(max_tokens=1), seed=0, arrival=0.0)
    sizes = [
        len(RequestLevelScheduler(4, 2, mbs).select(pool, pool.kv).choices) for mbs in (None, 2)
    ]
    assert sizes == [1, 2]
