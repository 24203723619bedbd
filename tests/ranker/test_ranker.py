"""The learned ranker: loss and calibration by hand, equal scores in both forms, checkpoints, and training."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from lab.rank_correlation import kendall_tau
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.helpers.bundled import demo_directory, ranker_directory
from orca_jax.model.describe import read_model_config
from orca_jax.sched.predict import Scored
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.tools.ranker.scorer import Calibration, Scorer
from orca_jax.tools.ranker.storage import PARAMS, load_scorer
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.errors import ConfigError
from scripts.length_ranker.export import calibrate, save_scorer, scorer_of
from scripts.length_ranker.ranker import Ranker, list_mle

pytestmark = pytest.mark.usefixtures("quick_compiles")
VOCAB = 20
SCRIPTS = Path(__file__).parents[2] / "scripts"


def make_ranker(seed: int = 0) -> Ranker:
    vectors = np.random.default_rng(seed).normal(size=(VOCAB, 8)).astype(np.float32)
    return Ranker(jnp.asarray(vectors), nnx.Rngs(seed), width=4, queries=2, hidden=6)


def make_scorer() -> Scorer:
    knots = Calibration(np.asarray([-1, 1], np.float32), np.asarray([10, 50], np.float32))
    return scorer_of(make_ranker(), knots)


def padded(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, T], with random ids as padding, and the mask of tokens."""
    is_token = (
        np.arange(max(map(len, prompts)))[None, :]
        < np.array([len(prompt) for prompt in prompts])[:, None]
    )
    ids = np.full(is_token.shape, VOCAB - 1, np.int32)
    ids[is_token] = np.concatenate(prompts)
    return ids, is_token


LOSSES = {
    "nothing to choose": ([3.0], [9], 0.0),
    "a coin": ([0.0, 0.0], [1, 2], math.log(2) / 2),
    "right": ([math.log(3), 0.0], [9, 1], math.log(4 / 3) / 2),
    "wrong": ([math.log(3), 0.0], [1, 9], math.log(4) / 2),
    "three alike": ([1.0, 1.0, 1.0], [3, 1, 2], (math.log(3) + math.log(2)) / 3),
}


@pytest.mark.parametrize("case", LOSSES)
def test_loss_by_hand(case: str) -> None:
    scores, lengths, expected = LOSSES[case]
    found = list_mle(jnp.asarray(scores, jnp.float32), jnp.asarray(lengths, jnp.float32))
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_host_and_model_say_the_same() -> None:
    random, ranker = np.random.default_rng(1), make_ranker()
    prompts = [random.integers(0, VOCAB, size).tolist() for size in (1, 2, 7, 30)]
    ids, is_token = padded(prompts)
    scorer = scorer_of(ranker, Calibration(np.zeros(1), np.ones(1)))
    wanted = np.asarray(
        nnx.jit(lambda ranker, *tokens: ranker(*tokens))(
            ranker, jnp.asarray(ids), jnp.asarray(is_token)
        )
    )
    assert [scorer.score(prompt) for prompt in prompts] == pytest.approx(
        wanted.tolist(), rel=1e-4, abs=1e-5
    )


# Scores, lengths and number of groups -> tokens at the middles of the groups.
CALIBRATIONS = {
    "one group": ([1, 2, 3], [4, 5, 9], 1, [6]),
    "as they are": ([3, 1, 2], [30, 10, 20], 3, [10, 20, 30]),
    "neighbours in the wrong order share": ([1, 2, 3], [10, 30, 20], 3, [10, 25, 25]),
    "and their neighbours with them": ([1, 2, 3], [30, 20, 10], 3, [20, 20, 20]),
    "groups of two": ([1, 2, 3, 4], [1, 3, 5, 7], 2, [2, 6]),
    "a larger group weighs more": ([1, 2, 3], [9, 9, 6], 2, [8, 8]),
}


@pytest.mark.parametrize("case", CALIBRATIONS)
def test_calibration_by_hand(case: str) -> None:
    scores, lengths, knots, expected = CALIBRATIONS[case]
    found = calibrate(np.asarray(scores, np.float32), np.asarray(lengths, np.float32), knots)
    assert found.tokens.tolist() == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(1, 400)), min_size=1, max_size=60)
)
def test_a_higher_score_never_means_fewer_tokens(pairs: list[tuple[float, int]]) -> None:
    scores, lengths = (np.asarray(values, np.float32) for values in zip(*pairs, strict=True))
    found = calibrate(scores, lengths, knots=8)
    asked = [found(score) for score in np.linspace(-6, 6, 40)]
    assert asked == sorted(asked)
    assert lengths.min() - 0.01 <= asked[0] and asked[-1] <= lengths.max() + 0.01


@pytest.fixture(scope="module")
def scipys_tau() -> Callable[..., Any]:
    from scipy import stats  # takes seconds to import

    found: Callable[..., Any] = stats.kendalltau
    return found


@given(pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30))
def test_tau_is_scipys(pairs: list[tuple[int, int]], scipys_tau: Callable[..., Any]) -> None:
    one, other = (np.asarray(values) for values in zip(*pairs, strict=True))
    constant = len(set(one.tolist())) == 1 or len(set(other.tolist())) == 1
    wanted = 0.0 if constant else scipys_tau(one, other).statistic
    assert kendall_tau(one, other) == pytest.approx(wanted, abs=1e-12)


def test_on_disk_and_back(tmp_path: Path) -> None:
    scorer = make_scorer()
    save_scorer(scorer, tmp_path)
    again = load_scorer(tmp_path)
    assert again([3, 1, 4, 1, 5]) == pytest.approx(scorer([3, 1, 4, 1, 5]), rel=1e-2)
    assert again.vocab_size == VOCAB and 10 <= again([2]) <= 50


def test_what_is_no_ranker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a length ranker") as error:
        load_scorer(tmp_path)
    assert error.value.param == "length_predictor"
    with pytest.raises(ConfigError, match="is not a length ranker"):
        load_scorer(demo_directory())
    broken = make_scorer()
    object.__setattr__(broken, "queries", np.full((3, 2), np.nan, np.float32))
    save_scorer(broken, tmp_path)
    with pytest.raises(ConfigError, match=r"queries: shape \[3, 2\], must be \[4, 2\].*not finite"):
        load_scorer(tmp_path)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_])
def test_a_ranker_of_other_types_than_floats_is_refused(tmp_path: Path, dtype: type) -> None:
    broken = make_scorer()
    object.__setattr__(broken, "queries", broken.queries.astype(dtype))
    save_scorer(broken, tmp_path)
    with pytest.raises(
        ConfigError, match=rf"queries: type {np.dtype(dtype).name} is not a float type"
    ):
        load_scorer(tmp_path)


def test_settings_that_name_one(tmp_path: Path) -> None:
    """The bundled ranker fits the demo model. Another vocabulary and a missing directory are errors."""
    model = read_model_config(str(demo_directory()))
    cache = CacheConfig(one_group(model.layer_caches), (64,), 16, "float32")
    config = EngineConfig(
        scheduler="chunked", scheduling_policy="shortest", length_predictor="demo"
    )
    _, pool = build_scheduling(choices_of(config), model, 256, cache, 64)
    assert isinstance(pool.predictor, Scored)
    with pytest.raises(ConfigError, match="vocabulary of 2048 ids") as error:
        build_scheduling(choices_of(config), TOY_MODEL, 256, cache, 64)
    assert error.value.param == "length_predictor"
    for name in ("median", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="length_predictor must be"):
            build_scheduling(
                choices_of(replace(config, length_predictor=name)), model, 256, cache, 64
            )


def test_the_bundled_one_is_small() -> None:
    directory = ranker_directory("demo")
    assert sum(path.stat().st_size for path in directory.rglob("*")) < 2**20
    assert (directory / PARAMS).is_dir() and "Kendall's tau" in (
        directory / "README.md"
    ).read_text()


@pytest.mark.slow
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of an answer is the number of sevens in its prompt, and training on a log is enough to learn this."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from length_ranker.log import read_log
    from length_ranker.training import Settings, scores_of, train
    from orca_jax.text.tokenizer import ByteTokenizer

    random = np.random.default_rng(0)
    path = tmp_path / "log.jsonl"
    lines = []
    for _ in range(600):
        prompt = random.integers(1, 9, 10).tolist()
        lines.append(json.dumps({"prompt_ids": prompt, "generated": 5 + 20 * prompt.count(7)}))
    path.write_text("\n".join([*lines, json.dumps({"prompt": "as text", "generated": 3})]))
    log = read_log([path], ByteTokenizer())
    assert len(log) == 601 and log.lengths[600] == 3 and log.is_token[600].sum() == 7
    learnt, held_out = log.split(1 / 6, seed=0)
    assert len(held_out) == 100 and len(learnt) == 501
    vectors = random.normal(size=(257, 8))
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers
        ranker = train(vectors, learnt, Settings(epochs=12, token_dropout=0.0, lists=2))
    assert kendall_tau(scores_of(ranker, held_out), held_out.lengths) > 0.7
    path.write_text(json.dumps({"prompt_ids": [1]}))
    with pytest.raises(ValueError, match=r"log\.jsonl:1 needs"):
        read_log([path], ByteTokenizer())
