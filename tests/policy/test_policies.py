"""Decisions that are refused or overruled, pauses, evictions, and classes from files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from orca_jax.assembly.choices import choices_of
from orca_jax.policy import API, Decision, PolicyView, RequestView
from orca_jax.policy.errors import PolicyError
from orca_jax.policy.guard import PATIENCE
from orca_jax.policy.kinds import OUTSIDE, PolicyKind, label_of, predictor_kind
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.sched.lab import Lab, Shape


class Base:
    """Runs all jobs that fit, in the order of arrival; tests change `decide`."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True

    def __init__(self) -> None:
        self.seen: list[RequestView] = []
        self.gone: list[int] = []
        self.begun: list[tuple[int, int]] = []

    def started(self, job: RequestView, num_tokens: int) -> None:
        self.begun.append((job.index, num_tokens))

    def ended(self, job: RequestView) -> None:
        self.gone.append(job.index)

    def decide(self, view: PolicyView) -> Decision:
        self.seen = [*view.residents, *view.waiting]
        return Decision(fitting(view, self.seen))


def fitting(view: PolicyView, jobs: Sequence[RequestView]) -> list[tuple[RequestView, int]]:
    """The first jobs that fit, whole."""
    run, free, budget, rows = [], view.free_pages, view.token_budget, view.free_rows
    for job in jobs:
        left = job.num_left
        if (
            not left
            or left > budget
            or len(run) == view.max_batch
            or (not job.is_resident and not rows)
        ):
            continue
        if view.pages(job, left) > free:
            continue
        free -= view.pages(job, left)
        budget -= left
        rows -= not job.is_resident
        run.append((job, left))
    return run


def lab_of(policy: Any, *, rows: int = 4, **shape: Any) -> Lab:
    """A toy engine with rows for more jobs than an iteration has."""
    settings = Shape(**{"budget": 16, "depth": 1, "reuses_prefixes": False, **shape})
    lab = Lab("chunked", max_bs=rows, page_size=4, max_model_len=40, shape=settings)
    lab.scheduler.inner = PolicyScheduler(
        policy, "Tried", max_bs=2, token_budget=settings.budget, num_rows=rows
    )
    return lab


def tokens_of(num_prompt: int, max_tokens: int) -> list[int]:
    """The tokens of a greedy request of `Lab.add`."""
    lab = Lab(max_model_len=40)
    lab.add("a", num_prompt, max_tokens)
    lab.run()
    return lab.tokens["a"]


def deciding(decide: Callable[[Base, PolicyView], Any]) -> Base:
    """A policy with this method."""
    return type("Tried", (Base,), {"decide": decide})()


def _raises(policy: Base, view: PolicyView) -> Decision:
    raise ValueError("no idea")


def _ended(policy: Base, view: PolicyView) -> Decision:
    policy.seen += [job for job in view.waiting if job not in policy.seen]
    return Decision([(job, job.num_left or 1) for job in policy.seen][:1])


BROKEN: dict[str, tuple[Callable[[Base, PolicyView], Any], str]] = {
    "raises": (_raises, r"Tried: decide raised ValueError: no idea at line \d+"),
    "returns a list": (lambda policy, view: [], "decide returned list instead of a Decision"),
    "twice the same": (lambda policy, view: Decision([(job, 1) for job in view.waiting] * 2), "job 0 is in the"),
    "an ended job": (_ended, "has ended, or was never seen"),
    "too many tokens": (lambda policy, view: Decision([(next(iter(view.waiting)), 9)]), "9 tokens, and num_left is 5"),
    "half a token": (lambda policy, view: Decision([(next(iter(view.waiting)), 0.5)]), "`run` needs pairs of a job"),
    "a generator": (lambda policy, view: Decision((job, 1) for job in view.waiting), "`run` needs pairs of a job"),
    "no tokens": (lambda policy, view: Decision([(next(iter(view.waiting)), 0)]), "0 tokens, and num_left is 5"),
    "over budget": (lambda policy, view: Decision([(job, 5) for job in view.waiting]), "10 tokens in one iteration"),
    "too many jobs": (lambda policy, view: Decision([(job, 1) for job in view.waiting]), "3 jobs in one iteration"),
    "evicts a waiting job": (lambda policy, view: Decision([], list(view.waiting)), "is evicted and has no row"),
    "sleeps and runs": (
        lambda policy, view: Decision([(job, 5) for job in view.waiting], (), 1.0),
        "wake_after is given together with jobs",
    ),
    "evicts and runs one": (
        lambda policy, view: Decision(
            [(job, job.num_left) for job in view.residents] or fitting(view, list(view.waiting)), view.residents[1:]
        ),
        "job 1 is run and evicted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_decision_that_cannot_be_applied_ends_the_engine(name: str) -> None:
    decide, message = BROKEN[name]
    lab = lab_of(deciding(decide), budget=9)
    for index in range(3 if name == "too many jobs" else 2 if name != "an ended job" else 1):
        lab.add(f"r{index}", 5 if name != "evicts and runs one" else 3, 2)
    with pytest.raises(PolicyError, match=message):
        for _ in range(20):
            lab.step()
    assert not [plan for plan in lab.executor.plans if len(plan.members) > 2], (
        "part of a refused decision was applied"
    )


def test_a_decision_beyond_the_free_pages_is_refused() -> None:
    lab = lab_of(
        deciding(lambda policy, view: Decision([(job, 8) for job in view.waiting])), num_pages=3
    )
    lab.add("r0", 8, 2)
    lab.add("r1", 8, 2)
    with pytest.raises(PolicyError, match="takes 4 pages, and 3 are free"):
        lab.step()


def test_a_paused_job_keeps_its_pages_and_its_tokens() -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        jobs = sorted(
            [*view.residents, *view.waiting], key=lambda job: (job.num_generated, job.index)
        )
        return Decision(fitting(view, jobs))

    lab = lab_of(policy := deciding(decide))
    for index in range(4):
        lab.add(f"r{index}", 3 + index, 6)
    lab.run()
    assert lab.pool.num_preemptions == 0
    assert max(len(plan.members) for plan in lab.executor.plans) == 2, (
        "four residents share two places"
    )
    assert lab.tokens == {f"r{index}": tokens_of(3 + index, 6) for index in range(4)}
    assert policy.gone == [0, 1]  # the others end in the last turn
    assert policy.begun.count((0, 1)) == 5


def test_an_evicted_job_computes_its_tokens_again() -> None:
    evictions = []

    def decide(policy: Base, view: PolicyView) -> Decision:
        evict = [
            job
            for job in view.residents
            if job.num_generated == 3 and not job.num_evictions and not job.index
        ]
        evictions.extend(job.index for job in evict)
        jobs = [job for job in [*view.residents, *view.waiting] if job not in evict]
        return Decision(fitting(view, jobs), evict)

    lab = lab_of(deciding(decide))
    lab.add("r0", 5, 6)
    lab.add("r1", 4, 8)
    lab.run()
    assert evictions == [0] and lab.pool.num_preemptions == 1
    assert lab.tokens == {"r0": tokens_of(5, 6), "r1": tokens_of(4, 8)}
    assert not lab.engine.stats.overruled_decisions


def test_the_oldest_resident_keeps_its_pages_until_it_has_drawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        return Decision([(job, 2) for job in view.waiting][:1], view.residents)

    lab = lab_of(deciding(decide), depth=1)
    lab.add("r0", 6, 2)
    lab.run()
    assert lab.tokens["r0"] == tokens_of(6, 2)
    assert (
        "Tried is overruled: job 0, the oldest resident, is evicted before it has drawn a token"
        in caplog.text
    )


def test_a_resident_that_is_left_out_is_added() -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        jobs = [*view.residents, *view.waiting]
        return Decision(
            fitting(view, jobs if len(jobs) < 2 else [job for job in jobs if job.index])
        )

    lab = lab_of(deciding(decide))
    lab.add("r0", 4, 3)
    lab.step()
    for index in range(12):
        lab.add(f"n{index}", 3, 20)
    for _ in range(3 * PATIENCE):
        lab.step()
    assert "r0" in lab.ends and lab.tokens["r0"] == tokens_of(4, 3)
    assert lab.engine.stats.overruled_decisions == lab.scheduler.inner.guard.num_overrules > 0


def test_pages_of_an_evicted_job_are_not_counted_twice() -> None:
    """The newcomers reuse the two pages that `r0` gives back: 7 of 6 pages would be held."""

    def decide(policy: Base, view: PolicyView) -> Decision:
        waiting = list(view.waiting)
        if len(waiting) == 2 and [job.num_generated for job in view.residents] == [1]:
            assert [view.pages(job, job.num_left) for job in waiting] == [
                1,
                4,
            ] and view.free_pages == 4
            return Decision([(job, job.num_left) for job in waiting], view.residents)
        return Decision(fitting(view, [*view.residents, *waiting]))

    lab = lab_of(deciding(decide), num_pages=6, reuses_prefixes=True)
    lab.add("r0", 8, 4)
    lab.step()
    lab.add("r1", 12, 1)
    lab.add("r2", 21, 1)
    lab.run()
    assert lab.pool.num_preemptions == 1 and not lab.engine.stats.overruled_decisions
    assert [len(lab.tokens[f"r{n}"]) for n in range(3)] == [4, 1, 1]


def test_an_empty_decision_admits_the_oldest_job_or_sleeps() -> None:
    lab = lab_of(deciding(lambda policy, view: Decision([])))
    lab.add("r0", 4, 2)
    lab.run()
    assert lab.tokens["r0"] == tokens_of(4, 2)
    slept: list[float] = []

    def decide(policy: Base, view: PolicyView) -> Decision:
        return (
            Decision(fitting(view, [*view.residents, *view.waiting]))
            if len(slept) > 2
            else Decision([], (), 0.004)
        )

    lab = lab_of(deciding(decide))
    lab.engine._sleep = slept.append
    lab.add("r0", 4, 2)
    lab.run()
    assert slept == [0.004] * 3 and not lab.engine.stats.overruled_decisions


SOURCE = """
from orca_jax.policy import API, Decision
class Mine:
    api, reads, may_starve = API, frozenset(), True
    def __init__(self, quantum=1): self.quantum = quantum
    def decide(self, view): return Decision([])
    def started(self, job, num_tokens): pass
    def ended(self, job): pass
class Old(Mine):
    api = 0
class Half:
    api = API
class Colours(Mine):
    reads = {"colour", "tenant"}
class Text(Mine):
    reads = "tenant"
class Length:
    api, refresh = API, 2
    def predict(self, job, ids): return 1 + job.num_generated
    def observe(self, job, length): pass
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_settings_name_a_class_of_a_file(source: Path) -> None:
    config = EngineConfig(
        model="preset:toy", scheduler=f"{source}:Mine", scheduler_options={"quantum": 3}
    )
    kind = choices_of(config).batches.kind
    assert isinstance(kind, PolicyKind) and kind.options == {"quantum": 3}
    label = label_of(config.scheduler, "scheduler")
    assert label is not None and label.startswith("Mine (sha256:") and "mine.py" not in label
    assert set(OUTSIDE) == {"scheduler", "scheduling_policy", "length_predictor", "retention"}


@pytest.mark.parametrize(
    ("setting", "of_class", "options", "message"),
    [
        ("scheduler", "Old", None, "Old is written for version 0 of orca_jax.policy, this is 1"),
        ("scheduler", "Half", None, "Half lacks reads, may_starve, decide, started, ended"),
        (
            "scheduler",
            "Colours",
            None,
            "Colours reads colour, which nothing fills; callers and predictors give prio",
        ),
        ("scheduler", "Text", None, "Text.reads must be a set of names, got 'tenant'"),
        ("scheduler", "Nobody", None, "has no class Nobody at its top"),
        ("scheduler", "Mine", "{", "scheduler_options is not JSON"),
        ("scheduler", "Mine", "[1]", "scheduler_options must be an object"),
        ("scheduling_policy", "Mine", None, "Mine lacks preempts, is_static, key"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(
    source: Path, setting: str, of_class: str, options: str | None, message: str
) -> None:
    values: dict[str, Any] = {setting: f"{source}:{of_class}", "scheduler_options": options}
    with pytest.raises(ConfigError, match=message):
        choices_of(EngineConfig(model="preset:toy", **values))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"must be one of orca, chunked, request_level, or FILE\.py:CLASS, got 'chunk'; did",
    ):
        choices_of(EngineConfig(model="preset:toy", scheduler="chunk"))


def test_a_prediction_is_made_again(source: Path) -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        predictions.extend(job.predicted for job in view.residents)
        return Decision(fitting(view, [*view.residents, *view.waiting]))

    predictions: list[float] = []
    lab = lab_of(deciding(decide))
    lab.pool.predictor = predictor_kind(f"{source}:Length")
    lab.add("r0", 4, 6)
    lab.run()
    assert predictions == [1, 3, 3, 5, 5]
