"""Proposals by lookup: the ids after the last occurrence of the longest n-gram."""

import pytest

from orca_jax.sched.drafts.ngram import NgramIndex, NgramProposer
from orca_jax.sched.drafts.proposer import Acceptance, Wish
from orca_jax.sched.request import Request
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams
from orca_jax.values.speculation import SpeculativeConfig


@pytest.mark.parametrize(
    ("ids", "least", "most", "proposed"),
    [
        ([1, 2, 3, 4, 1, 2], 2, 2, [3, 4, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 2, [4, 1, 2]),  # the last occurrence
        # the longest n-gram, though another one is nearer
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2, 3, [3, 8, 1]),
        ([1, 2, 3, 4, 5], 1, 3, []),
        ([5, 5], 1, 1, [5, 5, 5]),  # a loop of one id goes on
        ([9, 1, 2, 1, 2], 1, 2, [1, 2, 1]),
        ([1], 2, 3, []),
    ],
)
def test_proposal(ids: list[int], least: int, most: int, proposed: list[int]) -> None:
    """The same for ids that come together and one by one."""
    whole, single = NgramIndex(least, most, 0), NgramIndex(least, most, 0)
    whole.extend(ids)
    for token in ids:
        single.extend([token])
    assert whole.proposal(3) == single.proposal(3) == proposed
    assert whole.has_match == bool(proposed)


def test_index_tests_itself_on_generated_ids_only() -> None:
    """After a prompt of 40 ids in a loop, generated ids continue the loop and then leave it."""
    index = NgramIndex(2, 2, 40)
    index.extend([1, 2, 3, 4] * 10)
    before = index.each.rate
    index.extend([1, 2, 3, 4] * 5)
    assert index.each.rate > 0.85 > before
    index.extend([4, 3, 2, 1] * 2 + list(range(100, 120)))
    assert index.any.rate < 0.5


def test_proposer_follows_a_request() -> None:
    request = Request("a", [1, 2, 3], SamplingParams(), 0.0, 0, 0, frozenset())
    proposer = NgramProposer(4, 2, 3)
    assert proposer.ready(request) == 0
    request.generated_ids += [1, 2]
    assert proposer.ready(request) == 4
    assert proposer.propose([Wish(request, 2)]) == [[3, 1]]


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(0.5)
    acceptance.add_tests(0, 20)
    assert acceptance.rate < 0.1
    acceptance.add_tests(24, 24)
    assert acceptance.rate == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "num_speculative_tokens must be an integer from 1 to 16, got 0"),
        ({"num_speculative_tokens": 17}, "from 1 to 16"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        (
            {"num_speculative_tokens": 2, "method": "eagle"},
            "one of ngram, draft_model, got 'eagle'",
        ),
        ({"num_speculative_tokens": 2, "lookup": 2}, "no argument 'lookup'"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_max (2)",
        ),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_min": 0},
            "prompt_lookup_min must be an integer from 1",
        ),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 65}, "from 1 to 64"),
        ({"num_speculative_tokens": 2, "model": "demo"}, "no effect on method ngram"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "needs model"),
        (
            {
                "num_speculative_tokens": 2,
                "method": "draft_model",
                "model": "demo",
                "prompt_lookup_min": 2,
            },
            "no effect",
        ),
        (
            {"num_speculative_tokens": 2, "disable_by_batch_size": 0},
            "disable_by_batch_size must be at least 1",
        ),
        ("{", "is not valid JSON"),
        ("[4]", "must be a JSON object such as"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: object, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]
    assert words in raised.value.message
    assert raised.value.param == "speculative_config"
    assert raised.value.message.startswith("speculative_config: ")


def test_settings_are_read_from_mappings_and_json() -> None:
    expected = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=4)
    given: object
    for given in ({"num_speculative_tokens": 3, "prompt_lookup_max": 4}, expected):
        assert EngineConfig(speculative_config=given).speculative_config == expected  # type: ignore[arg-type]
    text = '{"num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    assert EngineConfig(speculative_config=text).speculative_config == expected  # type: ignore[arg-type]
    assert expected.ngrams == (4, 4)
    assert SpeculativeConfig(num_speculative_tokens=3).ngrams == (5, 5)
