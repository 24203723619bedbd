"""Models with states through the engine: transformers' tokens and log probabilities, whatever happens to a request."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.engine import Engine
from orca_jax.exec import pack
from orca_jax.exec.buckets import Segment
from orca_jax.values.cache_spec import NO_BLOCK
from orca_jax.values.config import SCHEDULERS
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Member, StateMove
from tests.covering import chosen, slow
from tests.model.states.hybrids import NEW, PROMPTS, RECORD, write
from tests.project.source import ROOT
from tests.test_same_tokens import Job, make_engine, run_updates

# largest difference of log probabilities, and least one of a broken model
CLOSE, MUTATED = 2e-5, 1e-2
pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")


@cache
def record(name: str) -> list[tuple[list[int], np.ndarray]]:
    """The ids of each prompt and its answer, and the log probabilities after them."""
    with np.load(ROOT / RECORD) as stored:
        return [
            (stored[f"{name}/ids_{i}"].tolist(), stored[f"{name}/logprobs_{i}"])
            for i in range(len(PROMPTS))
        ]


def jobs_of(name: str, steps: Sequence[int] = (0, 0, 0)) -> list[Job]:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=0)
    return [
        Job(tuple(ids[:length]), params, step)
        for (ids, _), length, step in zip(record(name), PROMPTS, steps, strict=True)
    ]


def difference(
    name: str, engine: Engine, steps: Sequence[int] = (0, 0, 0), *, same_tokens: bool = True
) -> float:
    """The largest difference of the log probabilities of generated tokens, up to the first other token."""
    worst, answers = 0.0, run_updates(engine, jobs_of(name, steps))
    for updates, (ids, lines), length in zip(answers, record(name), PROMPTS, strict=True):
        tokens = [token for update in updates for token in update.new_ids]
        found = [entry.logprob for update in updates for entry in update.logprobs]
        assert len(tokens) == len(found) == NEW
        assert tokens == ids[length:] or not same_tokens
        equal = next(
            (
                i
                for i, pair in enumerate(zip(tokens, ids[length:], strict=True))
                if len({*pair}) > 1
            ),
            NEW,
        )
        for token, logprob, line in zip(
            tokens[: equal + 1], found, lines[length - 1 :], strict=False
        ):
            worst = max(worst, abs(logprob - float(line[token])))
    return worst


def written(name: str, folder: Path) -> str:
    write(name, folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "devices", "stages", "settings"),
    [
        ("lfm3-0", 2, 1, {}),
        slow("minimax-2", 1, 2, {}),
        slow("youtu-1", 1, 1, {}),
        slow("lfm3-2", 2, 2, {}),
        slow("minimax-1", 1, 1, {"check_in_interval": 3, "cpu_products": "xla"}),
        slow("lfm3-3", 1, 1, {"page_size": 32, "overlap": False}),
        slow("lfm3-3", 1, 1, {"enable_prefix_caching": False}),
    ],
)
def test_chunks_and_snapshots(
    name: str,
    devices: int,
    stages: int,
    settings: dict[str, Any],
    program_cache: str,
    tmp_path: Path,
) -> None:
    """The second time, prompts are in the prefix cache up to their last token."""
    options = {"max_num_batched_tokens": 8, "pipeline_parallel_size": stages, **settings}
    for engine in make_engine(
        written(name, tmp_path), program_cache, devices, "chunked", **options
    ):
        assert difference(name, engine) <= CLOSE
        assert difference(name, engine, (0, 3, 5)) <= CLOSE
        wanted = sum(PROMPTS) - len(PROMPTS)
        if engine.pool.kv.states is not None:
            wanted = PROMPTS[0] - 1  # where a state was kept
        if settings.get("enable_prefix_caching") is False:
            wanted = 0
        # windows of fewer tokens lose pages; published ones are longer
        fewer = {0} if "check_in_interval" in settings else set()
        assert engine.pool.num_cache_hits in {wanted, *fewer}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheduler"), chosen(product(("lfm3-0", "minimax-2"), SCHEDULERS), size=1)
)
def test_schedulers(name: str, scheduler: str, program_cache: str, tmp_path: Path) -> None:
    for engine in make_engine(written(name, tmp_path), program_cache, 1, scheduler):
        assert difference(name, engine) <= CLOSE
        assert difference(name, engine, (0, 2, 4)) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_pages"), [("minimax-0", 6)])
def test_preemption(name: str, num_pages: int, program_cache: str, tmp_path: Path) -> None:
    """The longest request needs all pages in the end, so that others lose theirs and begin again, or wait."""
    options = {"num_pages": num_pages, "max_num_batched_tokens": 5}
    for engine in make_engine(written(name, tmp_path), program_cache, 1, "chunked", **options):
        assert difference(name, engine) <= CLOSE
        assert difference(name, engine, (5, 0, 2)) <= CLOSE
        assert engine.pool.num_preemptions > 0


@pytest.mark.parametrize("broken", ["fresh", "another"])
@pytest.mark.parametrize("name", ["lfm3-0", slow("minimax-2")])
def test_states_that_are_not_restored_are_seen(
    name: str, broken: str, program_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a hit of the prefix cache: zeros in place of the snapshot, or another request's state."""
    states, has_broken = pack._states, False

    def wrong(
        members: Sequence[Member], segments: Sequence[Segment]
    ) -> tuple[list[int], list[int]]:
        nonlocal has_broken
        changed = list(members)
        for index, member in enumerate(members):
            move = member.state
            # the first plan of a row
            if move is not None and member.start and member.sampling is not None:
                has_broken = True
                source = NO_BLOCK if broken == "fresh" else move.target
                changed[index] = member._replace(state=StateMove(source, move.target))
        return states(changed, segments)

    devices = 2 if name == "lfm3-0" else 1  # the programs of `test_chunks_and_snapshots`
    for engine in make_engine(
        written(name, tmp_path), program_cache, devices, "chunked", max_num_batched_tokens=8
    ):
        assert difference(name, engine) <= CLOSE
        monkeypatch.setattr(pack, "_states", wrong)
        assert difference(name, engine, same_tokens=False) > MUTATED
        assert has_broken
