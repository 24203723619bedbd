"""The policies of the shelf, each by a table of batches computed by hand."""

import ast
import random
import sys

import pytest

from lab.baselines import POLICIES, Setting
from lab.policies.ewsjf import Ewsjf
from lab.policies.mc_sf import McSf, SortedF
from lab.policies.plas import Plas
from lab.policies.pools import Pools
from lab.policies.prefill_first import PrefillFirst
from lab.policies.prefix_match import PrefixMatch
from lab.policies.sagesched import SageSched, gittins
from lab.policies.sarathi import Sarathi
from lab.policies.skip_join_mlfq import SkipJoinMlfq
from lab.policies.srpt import Srpt
from lab.policies.vtc import VirtualTokenCounter
from orca_jax.values.request import SamplingParams
from tests.lab.shelf.batches import SHELF, batches, lab_of
from tests.project.source import ROOT

FILES = sorted((ROOT / "lab" / "policies").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_policy_needs_the_protocol_alone(path: object) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {str(name) for name in names} - {"orca_jax.policy"} <= set(sys.stdlib_module_names) | {
        "collections.abc"
    }


@pytest.mark.parametrize("name", SHELF)
def test_every_request_gets_its_tokens(name: str) -> None:
    """Random arrivals, few pages, rows for more jobs than a batch has: all tokens, as if each request ran alone."""
    rng, evictions = random.Random(name), 0
    for _ in range(12):
        pages = rng.choice([9, 12, 40])
        lab = lab_of(SHELF[name], most=3, rows=rng.choice([3, 6]), num_pages=pages, budget=64)
        prompts = rng.sample(range(2, 20), 8)
        for number, length in enumerate(prompts):
            lab.add(f"r{number}", length, rng.randint(1, 16))
            for _ in range(rng.randrange(4)):
                lab.step()
        lab.run()
        assert lab.engine.stats.overruled_decisions == 0
        evictions += lab.pool.num_preemptions
        for number, length in enumerate(prompts):
            found = lab.tokens[f"r{number}"]
            prompt = list(range(1, length + 1))
            assert found == lab.expected(
                prompt, SamplingParams(max_tokens=len(found), temperature=0)
            )
    assert evictions or name in ("mc_sf", "sorted_f", "pools"), "pages were never short"


def test_sarathi_chunks_a_prompt_beside_increments() -> None:
    lab = lab_of(Sarathi(), budget=4)
    assert batches(lab, ("A", 2, 3), ("B", 7, 2)) == ["A2 B2-", "A1 B3-", "A1 B2", "B1"]


def test_prompts_come_first_and_alone() -> None:
    lab = lab_of(PrefillFirst(), most=3)
    lab.add("A", 5, 4)
    assert batches(lab, ("B", 3, 2), ("C", 2, 1), steps=2) == ["A5", "A1", "B3 C2", "A1 B1", "A1"]


def test_the_latest_request_loses_its_pages() -> None:
    """Six pages of four, two for each prompt. The ninth tokens of A and B take those of C, the 13th of A those of B."""
    lab = lab_of(PrefillFirst(), most=3, num_pages=6)
    found = batches(lab, ("A", 7, 8), ("B", 7, 8), ("C", 7, 4))
    assert found == ["A7 B7 C7", "A1 B1 C1", *["A1 B1"] * 4, "A1", "A1", "B13", "B1", "C9", "C1"]
    assert lab.pool.num_preemptions == 2


def test_a_request_without_a_victim_loses_its_own_pages() -> None:
    """Three pages of four. A takes the page of C, and none is left for the fifth token of B."""
    lab = lab_of(PrefillFirst(), most=3, num_pages=3)
    assert batches(lab, ("A", 4, 2), ("B", 4, 2), ("C", 3, 2)) == ["A4 B4 C3", "A1", "B5 C4"]


def test_new_requests_leave_a_page_free() -> None:
    """32 pages of one token: twelve are free beside the prompt of A, and one of them stays free."""
    lab = lab_of(PrefillFirst(), num_pages=32, page_size=1)
    lab.add("A", 20, 3)
    assert batches(lab, ("B", 12, 1), steps=1) == ["A20", "A1", "A1", "B12"]


def test_an_iteration_has_a_bound_on_prompt_tokens() -> None:
    lab = lab_of(PrefillFirst(most_tokens=8), most=4)
    assert batches(lab, ("A", 10, 1), ("B", 5, 1), ("C", 3, 1), ("D", 1, 1)) == [
        "A10",
        "B5 C3",
        "D1",
    ]


def test_running_requests_are_shared_among_the_stages() -> None:
    """Two iterations in flight and three requests: two and one, and not three and none."""
    lab = lab_of(PrefillFirst(in_flight=2), most=4, depth=2)
    found = batches(lab, ("A", 2, 3), ("B", 2, 3), ("C", 2, 3))
    assert found[0] == "A2 B2 C2" and found[1:3] == ["A1 B1", "C1"]


def test_pools_take_turns() -> None:
    """One place for outputs up to 2 and one for longer ones: B waits for A, and C does not."""
    lab = lab_of(Pools(2, (2,)))
    assert batches(lab, ("A", 3, 2), ("B", 2, 2), ("C", 4, 3)) == [
        "A3",
        "C4",
        "A1",
        "C1",
        "B2",
        "C1",
        "B1",
    ]


def test_a_pool_stays_within_the_pages() -> None:
    """20 pages of one token: A reserves 8 of them; C of the other pool needs 14 and waits."""
    lab = lab_of(Pools(2, (4,)), num_pages=20, page_size=1)
    assert batches(lab, ("A", 5, 3), ("C", 8, 6))[:4] == ["A5", "A1", "A1", "C8"]


def test_places_are_shared_equally() -> None:
    assert Pools(32).sizes == [10, 11, 11] and sum(Pools(96).sizes) == 96
    with pytest.raises(ValueError, match="places must be at least 3"):
        Pools(2)


def test_the_systems_of_the_paper_have_the_policies_of_the_shelf() -> None:
    setting = Setting(32, 0, 2, 2, 512)
    for name, kind in (("prefill_first", PrefillFirst), ("pools", Pools)):
        assert isinstance(POLICIES[name].make(setting).policy, kind)  # type: ignore[attr-defined]


def test_counters_alternate_between_clients() -> None:
    """One place. A's prompt is charged 4 and its token 2. B gets 4 and 2, then A is first again by arrival."""
    policy = VirtualTokenCounter()
    lab = lab_of(policy, most=1)
    requests = [(name, 4, 1, name[0]) for name in ("A1", "A2", "A3", "B1", "B2")]
    assert batches(lab, *requests) == ["A14", "B14", "A24", "B24", "A34"]
    assert policy.counters == {"A": 18, "B": 12}


def test_a_client_that_returns_is_lifted() -> None:
    """B comes when A has 12: it starts there, and not at 0, so that A is not locked out."""
    policy = VirtualTokenCounter()
    lab = lab_of(policy, most=1)
    for number in range(1, 5):
        lab.add(f"A{number}", 4, 1)
    found = batches(lab, ("B1", 4, 1, "B"), ("B2", 4, 1, "B"), steps=2)
    assert found == ["A14", "A24", "A34", "B14", "A44", "B24"]


def test_k_is_between_the_order_of_arrival_and_that_of_matches() -> None:
    """One place and pages of four. W leaves two pages of 1, 2, 3, ... in the cache; X, Y and Z match 0, 4 and 8."""
    prompts = {"X": [9] * 9, "Y": [1, 2, 3, 4, 7, 7, 7, 7, 7], "Z": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    orders = {}
    for k in (1, 2, None):
        lab = lab_of(PrefixMatch(k), most=1, reuses_prefixes=True)
        lab.add("W", 9, 1)
        lab.step()
        for name, prompt in prompts.items():
            lab.engine.add_request(name, prompt, SamplingParams(max_tokens=1, temperature=0))
        lab.run()
        orders[k] = lab.batches[1:]
    assert orders == {1: ["X9", "Y5", "Z1"], 2: ["Z1", "X9", "Y5"], None: ["Z1", "Y5", "X9"]}


def test_a_long_prompt_joins_a_low_queue_and_a_served_one_moves_down() -> None:
    """Quanta of 2, 4 and 8 tokens. L skips to the third queue, S to the first; S moves down after two tokens."""
    lab = lab_of(SkipJoinMlfq(2), most=1, rows=3)
    lab.add("L", 6, 3)
    found = batches(lab, ("S", 1, 4), ("T", 1, 2), steps=1)
    assert found == ["L6", "S1", "S1", "T1", "T1", "S1", "S1", "L1", "L1"]
    assert lab.pool.num_preemptions == 0, "L was paused"


def test_a_starved_job_moves_up() -> None:
    """A turn is a few seconds of the clock. After ten without service L is in the first queue, before the newer S."""
    lab = lab_of(SkipJoinMlfq(4, starvation=10.0), most=1, rows=2)
    lab.add("L", 6, 2)
    found = batches(lab, ("S", 1, 12), steps=1)
    assert found.index("L1") < len(found) - 1, "it ran before S had ended"


def test_programs_with_less_service_come_first() -> None:
    """P has got 6 tokens. Its next call waits for the two tokens of Q, which ran for three before."""
    policy = Plas(None)
    lab = lab_of(policy, most=1)
    batches(lab, ("P1", 5, 2, "P"), ("Q1", 2, 2, "Q"))
    assert policy.key.__self__ is policy and dict(policy._attained) == {"P": 6, "Q": 3}
    assert batches(lab, ("P2", 1, 2, "P"), ("Q2", 1, 2, "Q"))[-4:] == ["Q21", "Q21", "P21", "P21"]


def test_the_queues_of_programs_bound_the_changes() -> None:
    """Bounds at 4 tokens: P and Q run to 4 each, in the order of arrival, and then again."""
    lab = lab_of(Plas((4,)), most=1, rows=2)
    found = batches(lab, ("P", 2, 5, "P"), ("Q", 2, 5, "Q"))
    assert found == ["P2", "P1", "P1", "Q2", "Q1", "Q1", "P1", "P1", "Q1", "Q1"]


def test_the_shortest_remaining_job_comes_first() -> None:
    """A has five tokens left when B with two comes; C with five arrives later than A, whose three are fewer."""
    lab = lab_of(Srpt(), most=1, rows=3)
    lab.add("A", 2, 6)
    found = batches(lab, ("B", 3, 2), ("C", 1, 5), steps=1)
    assert found == ["A2", "B3", "B1", *["A1"] * 5, *["C1"] * 5]


def test_a_job_near_its_end_is_not_interrupted() -> None:
    lab = lab_of(Srpt(limit=0.5), most=1, rows=2)
    lab.add("A", 2, 4)
    assert batches(lab, ("B", 3, 1), steps=2) == ["A2", "A1", "A1", "A1", "B3"]


def test_noise_changes_the_order_and_repeats() -> None:
    orders = set()
    for _ in range(2):
        lab = lab_of(Srpt(noise=2.0), most=1)
        orders.add(tuple(batches(lab, *[(f"r{length}", 2, length) for length in (5, 6, 7, 8)])))
    assert len(orders) == 1 and orders != {tuple(batches(lab_of(Srpt(), most=1), ("r5", 2, 5)))}


def test_memory_is_looked_ahead() -> None:
    """Ten pages of one token. C runs at once. At the end of A, B would hold 4 beside 7, and 3 if it begins later."""
    lab = lab_of(McSf(1), most=3, num_pages=10, page_size=1)
    found = batches(lab, ("A", 4, 4), ("B", 1, 6), ("C", 2, 1))
    assert found == ["C2 A4", *["A1 B1"] * 3, *["B1"] * 3]


def test_too_low_predictions_evict_the_latest() -> None:
    """The sum of all tokens fits only by the predicted lengths, which are half of the true ones."""
    lab = lab_of(McSf(1), most=2, num_pages=10, page_size=1)
    lab.pool.predictor = type(
        "Half",
        (),
        {
            "refresh": None,
            "predict": lambda self, r, ids: 2.0,
            "observe": lambda self, r, length: None,
        },
    )()
    batches(lab, ("A", 3, 6), ("B", 3, 6))
    assert lab.pool.num_preemptions == 1


def test_sorted_f_takes_the_large_batch_before_the_short_job() -> None:
    """Ten pages of one token. F is 6 / 9 for B, C and D together and 1 for A: shortest first begins with A."""
    jobs = (("A", 9, 1), ("B", 1, 2), ("C", 1, 2), ("D", 1, 2))
    lab = lab_of(McSf(1), most=4, num_pages=10, page_size=1)
    assert batches(lab, *jobs) == ["A9 B1", "B1 C1 D1", "C1 D1"]
    lab = lab_of(SortedF(1), most=4, num_pages=10, page_size=1)
    assert batches(lab, *jobs) == ["B1 C1 D1", "B1 C1 D1", "A9"]
    lab = lab_of(SortedF(1, most_exact=1), most=4, num_pages=10, page_size=1)
    assert batches(lab, *jobs) == ["B1 C1 D1", "B1 C1 D1", "A9"]


def test_a_prompt_above_the_budget_comes_in_chunks() -> None:
    lab = lab_of(McSf(4), budget=4)
    assert batches(lab, ("A", 9, 2), ("B", 2, 1)) == ["B2", "A4-", "A4-", "A1", "A1"]


def test_ewsjf_weighs_the_wait_of_a_queue_by_its_length() -> None:
    """Queues of ten tokens. C waits as long as B and is shorter; D has waited long enough to come before A."""
    policy = Ewsjf(10, 0.0)
    lab = lab_of(policy, most=1)
    lab.add("X", 1, 6)
    lab.step()
    found = batches(lab, ("B", 15, 1), ("C", 5, 1), ("D", 16, 1))
    assert [each for each in found if "X" not in each] == ["C5", "B15", "D16"]


def test_the_index_of_gittins_weighs_cost_by_the_chance_to_end() -> None:
    assert gittins([4.0]) == 4.0
    assert gittins([1.0, 9.0]) == 2.0  # stop at 1: a cost of 1, and half of the jobs have ended
    assert gittins([8.0, 9.0]) == 8.5  # wait for all


def test_sagesched_prefers_lengths_that_ended_soon() -> None:
    """Short prompts ended after two tokens and long ones after six: then short ones come first, though one is newer."""
    lab = lab_of(SageSched(quantum=4), most=1, rows=1)
    batches(lab, ("A", 2, 2), ("B", 20, 6))
    before = len(lab.batches)
    lab.add("C", 2, 9)
    lab.add("D", 20, 9)
    lab.add("E", 3, 9)
    lab.run()
    first = [each.partition(" ")[0][0] for each in lab.batches[before:]]
    assert list(dict.fromkeys(first)) == ["C", "E", "D"]
