"""Models with states through the executor: transformers' log probabilities, whatever the launches and the blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from orca_jax.exec.cache import (
    SNAPSHOT_SHARE,
    size_cache,
    stage_bytes,
    with_num_pages,
    workspace_bytes,
)
from orca_jax.exec.compile import memory_of
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.programs import Programs
from orca_jax.exec.states import StateDemand, layer_bytes, state_demand
from orca_jax.model.describe import config_from_hf
from orca_jax.model.load import prepare_load, tensor_mesh
from orca_jax.model.sharding import on_shards
from orca_jax.model.stages import spans
from orca_jax.values.cache_spec import NO_BLOCK, form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.step import Member, StateMove, StepPlan
from tests.covering import slow
from tests.exec.test_groups import PAGE_SIZE, ROWS, Host, models_of, poisoned
from tests.model.states.hybrids import PROMPTS, RECORD, config_of, write
from tests.project.source import ROOT
from tests.sampling import GREEDY

LENGTH, NUM_STATES, CLOSE, MUTATED = 64, 8, 2e-5, 1e-2
pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs")
quick = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@cache
def executor_of(
    name: str,
    form: str,
    shards: int,
    stages: int,
    directory: str,
    base: Path,
    *,
    copies: bool = False,
    moves: bool = False,
) -> JaxExecutor:
    folder = base / name
    folder.mkdir(exist_ok=True)
    write(name, folder)
    loading = prepare_load(folder, dtype="float32")
    model, models = loading.config, models_of(loading, form, shards, stages)
    groups, num_states = (
        form_groups(on_shards(model, shards).layer_caches, LENGTH),
        NUM_STATES * model.has_states,
    )
    cache = CacheConfig(
        groups, (ROWS * len(groups) * 16,), PAGE_SIZE, "float32", num_states=num_states
    )
    config = ExecutorConfig("float32", shards, (4, 16), ROWS, LENGTH, cache, "xla", directory)
    config = replace(
        config, pipeline_parallel_size=stages, copies_blocks=copies, moves_blocks=moves
    )
    return JaxExecutor(models, model, config)


@cache
def record(name: str) -> list[tuple[list[int], np.ndarray]]:
    """The ids of each prompt and its answer, and transformers' log probabilities after them."""
    with np.load(ROOT / RECORD) as stored:
        return [
            (stored[f"{name}/ids_{i}"].tolist(), stored[f"{name}/logprobs_{i}"])
            for i in range(len(PROMPTS))
        ]


class StateHost(Host):
    """Gives out blocks of states too: a row writes to another one than it reads if `is_moving`."""

    def __init__(self, executor: JaxExecutor, *, is_moving: bool) -> None:
        cache = executor.config.cache
        super().__init__(cache.groups, cache.num_blocks[0])
        self.is_moving = is_moving
        self.free_states = list(range(NUM_STATES))
        self.states = [NO_BLOCK] * ROWS

    def scored(self, row: int, start: int, ids: list[int], targets: list[int]) -> Member:
        source = self.states[row] if start else NO_BLOCK
        if self.is_moving or source == NO_BLOCK:
            self.states[row] = self.free_states.pop(0)
        member = self.member(row, start, ids, is_sampling=False)
        sampling = replace(GREEDY.params, prompt_logprobs=0)
        move = StateMove(source, self.states[row])
        return member._replace(
            targets=targets,
            state=move,
            sampling=GREEDY._replace(params=sampling) if start == 0 else None,
        )

    def keep(self, members: Sequence[Member]) -> None:
        """Let other requests have the blocks that were read alone."""
        moves = [member.state for member in members if member.state is not None]
        self.free_states += [
            move.source for move in moves if move.source not in (NO_BLOCK, move.target)
        ]


def difference(
    name: str, executor: JaxExecutor, chunks: Sequence[int], *, is_moving: bool
) -> float:
    """The largest difference from transformers' log probabilities, with `chunks[i]` tokens of row i in an iteration."""
    host, done, worst, compared = StateHost(executor, is_moving=is_moving), [0] * ROWS, 0.0, 0
    while any(at < len(ids) - 1 for at, (ids, _) in zip(done, record(name), strict=True)):
        members = []
        for row, (ids, _) in enumerate(record(name)):
            size = min(chunks[row], len(ids) - 1 - done[row])
            if size > 0:
                targets = ids[done[row] + 1 : done[row] + size + 1]
                members.append(
                    host.scored(row, done[row], ids[done[row] : done[row] + size], targets)
                )
                done[row] += size
        result = executor.collect(executor.submit(StepPlan(0, tuple(members))))
        host.keep(members)
        for member, found in zip(members, result.members, strict=True):
            expected = record(name)[member.row][1][member.start :]
            for target, score, line in zip(member.targets, found.scores, expected, strict=False):
                worst, compared = max(worst, abs(score.logprob - line[target])), compared + 1
    assert compared == sum(len(ids) - 1 for ids, _ in record(name)), "all tokens are compared"
    return worst


@pytest.mark.parametrize(
    ("name", "form", "shards", "stages"),
    [
        slow("minimax-0", "scanned", 2, 1),
        slow("lfm3-2", "unrolled", 1, 2),
        *(slow(name, "switched", 1, 1) for name in ("mamba2-0", "lfm2_moe-0")),
        *(slow(name, "switched", 2, 2) for name in ("youtu-1", "bamba-1")),
        slow("qwen3_next-1", "switched", 2, 1),
        slow("falcon_h1-0", "switched", 2, 1),
    ],
)
@quick
def test_log_probabilities_are_those_of_transformers(
    name: str, form: str, shards: int, stages: int, program_cache: str, base: Path
) -> None:
    """Chunks of other sizes in each row, members cut into several launches, blocks in place and others each time."""
    executor = poisoned(executor_of(name, form, shards, stages, program_cache, base))
    assert difference(name, executor, (3, 40, 1), is_moving=True) <= CLOSE
    assert difference(name, executor, (40, 2, 5), is_moving=False) <= CLOSE


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("lfm3-2", "switched"),
        slow("minimax-0", "scanned"),
        slow("lfm3-2", "unrolled"),
        *(slow("minimax-0", form) for form in ("unrolled", "switched")),
        slow("minimax-1", "unrolled"),
    ],
)
@quick
def test_pools_are_not_copied(name: str, form: str, base: Path) -> None:
    """A copy of the pages or of the states, or of those of one layer, would show in the temporary memory."""
    write(name, base)
    mesh = tensor_mesh(jax.devices()[:1])
    loading = prepare_load(base, dtype="float32")
    decoder = loading.shapes(mesh)
    if form != "scanned":
        decoder.unstack(switched=form == "switched")
    groups = form_groups(loading.config.layer_caches, LENGTH)
    cache = CacheConfig(groups, (20_000,), PAGE_SIZE, "float32", num_states=20_000)
    programs = Programs(
        decoder, ExecutorConfig("float32", 1, (16,), ROWS, LENGTH, cache, "xla"), mesh
    )
    alias, temp = memory_of(programs.lowerings()["layers", 16]().compile())
    state = programs._state().caches
    pages, states = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in state
    )
    layers = loading.config.num_layers
    assert alias >= pages + states and temp < min(pages, states) / (2 * layers), (
        pages,
        states,
        temp,
    )
    assert temp <= workspace_bytes(loading.config, 16, ROWS, LENGTH)


def test_bytes_of_states() -> None:
    """MiniMax keeps a matrix of float32 for each head, LFM3 the inputs of `width` - 1 tokens in the model's type."""
    model = config_from_hf(config_of("minimax-0"))
    assert layer_bytes(model, "bfloat16") == (0, 4 * 4 * 4 * 4, 0, 4 * 4 * 4 * 4)
    model = config_from_hf(config_of("lfm3-0"))
    assert model.short_conv is not None
    assert layer_bytes(model, "bfloat16")[0] == 2 * (model.short_conv.width - 1) * model.embed_dim
    assert layer_bytes(config_from_hf({"model_type": "llama"}), "bfloat16") == (0,) * 32


@pytest.mark.parametrize("num_stages", [1, 2])
def test_sizes_of_states(num_stages: int) -> None:
    """A block for each row comes first, then snapshots up to their share, then pages; the fullest stage decides."""
    model = config_from_hf(config_of("lfm3-2"))
    parts, form = (
        spans(model, num_stages),
        CacheConfig(form_groups(model.layer_caches, LENGTH), (), PAGE_SIZE, "float32"),
    )
    shape = {"num_rows": 3, "max_model_len": LENGTH, "longest": 16}
    live, snapshots = (state_demand(model, "float32", 3, number) for number in (0, 40))
    assert (live.fewest, live.most, snapshots.fewest, snapshots.most) == (3, 3, 6, 126)

    def size(memory: int, states: StateDemand) -> tuple[int, int]:
        """The number of states, and the bytes of the fullest stage."""
        found = size_cache(form, parts, memory=memory, states=states, **shape)
        return found.num_states, max(stage_bytes(found, span, states) for span in parts)

    memory = 30_000
    few = size(memory, snapshots)
    block = max(snapshots.block_bytes(span) for span in parts)
    assert 6 < few[0] <= 6 + SNAPSHOT_SHARE * memory / block and 0.8 * memory < few[1] <= memory
    assert size(memory, live)[0] == 3
    assert size(100_000_000, snapshots)[0] == 126, "all that can be of use"
    with pytest.raises(ConfigError, match="are free for the KV cache"):
        size(1000, live)
    given = with_num_pages(form, 40, LENGTH, snapshots)
    whole = spans(model, 1)[0]
    pages = stage_bytes(replace(given, num_states=0), whole, snapshots)
    assert 0 < (given.num_states - 6) * snapshots.block_bytes(whole) <= SNAPSHOT_SHARE * pages
