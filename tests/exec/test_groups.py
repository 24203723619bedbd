"""Several groups of layers: blocks that leave a row, tables of the entries that are left, and transformers' tokens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.pack import Layout
from orca_jax.exec.rows import RowTable
from orca_jax.exec.stage import StageModel
from orca_jax.model.load import Loading, prepare_load, tensor_mesh
from orca_jax.model.stages import spans
from orca_jax.values.cache_spec import NO_BLOCK, LayerGroup, form_groups
from orca_jax.values.config import CacheConfig, ExecutorConfig
from orca_jax.values.step import Member, StepPlan
from tests.covering import slow
from tests.model.reference import REFERENCE
from tests.sampling import GREEDY

PAGE_SIZE, LENGTH, ROWS = 4, 64, 3
few = pytest.mark.usefixtures("few_programs", "quick_compiles")
pytestmark = pytest.mark.usefixtures("compiled_when_used")


class Host:
    """Gives out blocks as a scheduler does. A block that leaves a row is the next one to be given out."""

    def __init__(self, groups: Sequence[LayerGroup], num_blocks: int) -> None:
        self.groups = groups
        self.free = list(range(num_blocks))
        self.entries: list[list[list[int]]] = [[[] for _ in groups] for _ in range(ROWS)]

    def member(self, row: int, start: int, ids: list[int], *, is_sampling: bool) -> Member:
        num_old, new = len(self.entries[row][0]), []
        for group, entries in zip(self.groups, self.entries[row], strict=True):
            for index in range(group.first_needed(start) // PAGE_SIZE):
                if entries[index] != NO_BLOCK:
                    self.free.append(entries[index])
                    entries[index] = NO_BLOCK
            count = -(-(start + len(ids)) // PAGE_SIZE) - len(entries)
            new.append([self.free.pop() for _ in range(count)])
            entries.extend(new[-1])
        sampling = GREEDY if start == 0 else None
        new_blocks = tuple(new) if new[0] else ()
        return Member(str(row), row, start, ids, is_sampling, False, num_old, new_blocks, sampling)

    def held(self, row: int) -> list[int]:
        return [sum(entry != NO_BLOCK for entry in entries) for entries in self.entries[row]]


def models_of(loading: Loading, form: str, shards: int, stages: int) -> list[StageModel]:
    """The stages of a model, with its layers in a form."""
    models = []
    for index, span in enumerate(spans(loading.config, stages)):
        mesh = tensor_mesh(jax.devices()[shards * index : shards * (index + 1)])
        decoder = loading.load(mesh, lambda *_: None, span)
        if form != "scanned":
            decoder.unstack(switched=form == "switched")
        models.append(StageModel(decoder, mesh))
    return models


@cache
def executor_of(
    name: str,
    form: str,
    shards: int,
    stages: int,
    directory: str,
    attention: str,
    *,
    copies: bool = False,
) -> JaxExecutor:
    loading = prepare_load(REFERENCE / name, dtype="float32")
    model, models = loading.config, models_of(loading, form, shards, stages)
    groups = form_groups(model.layer_caches, LENGTH)
    cache = CacheConfig(groups, (ROWS * len(groups) * 12,), PAGE_SIZE, "float32")
    config = ExecutorConfig("float32", shards, (4, 16), ROWS, LENGTH, cache, attention, directory)
    return JaxExecutor(
        models, model, replace(config, pipeline_parallel_size=stages, copies_blocks=copies)
    )


def poisoned(executor: JaxExecutor) -> JaxExecutor:
    """The executor, with NaN wherever nothing was written."""
    for stage in executor.stages:
        caches = jax.tree.map(
            lambda x: jax.device_put(jnp.full_like(x, jnp.nan), x.sharding), stage.state.caches
        )
        stage.state = stage.state._replace(caches=caches)
    return executor


@few
@pytest.mark.parametrize(
    ("name", "form", "shards", "stages", "attention", "chunk"),
    [
        ("gemma3-one-kv-head", "scanned", 1, 1, "xla", 3),
        slow("gemma3-with-images", "unrolled", 1, 1, "gather", 40),
        slow("gemma3-one-kv-head", "scanned", 1, 1, "xla", 40),
        slow("gemma2", "switched", 2, 1, "xla", 3),
        slow("gemma3-one-kv-head", "switched", 1, 2, "xla", 40),
        *(slow("mistral-window", "switched", 1, 1, "xla", chunk) for chunk in (3, 40)),
        *(slow("gemma3", "switched", 2, 2, "xla", chunk) for chunk in (3, 40)),
    ],
)
def test_tokens_are_those_of_transformers(
    name: str, form: str, shards: int, stages: int, attention: str, chunk: int, program_cache: str
) -> None:
    """Prompts in chunks, and in members cut into launches; each block that is left holds other tokens at once."""
    executor = poisoned(executor_of(name, form, shards, stages, program_cache, attention))
    groups = executor.config.cache.groups
    host, expected = (
        Host(groups, executor.config.cache.num_blocks[0]),
        np.load(REFERENCE / name / "expected.npz"),
    )
    contexts = [expected[f"ids_{row}"].tolist() for row in range(ROWS)]
    lengths = [len(ids) for ids in contexts]
    done = [0] * ROWS
    while any(len(ids) < length + 12 for ids, length in zip(contexts, lengths, strict=True)):
        members = []
        for row, ids in enumerate(contexts):
            if len(ids) < lengths[row] + 12:
                part = ids[done[row] : done[row] + chunk]
                members.append(
                    host.member(row, done[row], part, is_sampling=done[row] + len(part) == len(ids))
                )
                done[row] += len(part)
        result = executor.collect(executor.submit(StepPlan(0, tuple(members))))
        for member, found in zip(members, result.members, strict=True):
            contexts[member.row] += found.run
            most = [
                group.most_blocks(len(contexts[member.row]), chunk, PAGE_SIZE) for group in groups
            ]
            assert all(np.array(host.held(member.row)) <= most)
    for row, ids in enumerate(contexts):
        assert ids[lengths[row] :] == expected[f"greedy_{row}"].tolist()


def test_a_launch_has_the_entries_that_its_tokens_need() -> None:
    """A window of 5 in pages of 4: tokens 13 and 14 see those from 9 on, in page 2."""
    rows = RowTable(num_rows=2, num_pages=8, num_groups=3)
    blocks = tuple([10 * group + page for page in range(4)] for group in range(3))
    rows.update([Member("r", 1, 0, [7], is_sampling=False, new_blocks=blocks)])
    layout = Layout(num_tokens=2, num_rows=2, num_pages=8, windows=(None, 5, 5), page_size=4)
    assert [tables.width for tables in layout.tables] == [8, 3]
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    view["query_len"][0], view["context_len"][0] = 2, 15
    layout.write_blocks(view, rows.blocks, np.array([1], np.int32), np.array([13], np.int32))
    full, *windowed = layout.unpack(jnp.asarray(vector)).requests
    assert full.page_table[0, :4].tolist() == [0, 1, 2, 3] and full.context_len.tolist() == [15, 0]
    assert [each.page_table[0, :2].tolist() for each in windowed] == [[12, 13], [22, 23]]
    assert [each.context_len.tolist() for each in windowed] == [[7, 0]] * 2
    assert [each.query_len.tolist() for each in windowed] == [[2, 0]] * 2


def test_an_entry_that_a_row_never_had_is_a_block() -> None:
    """Kernels may transfer a page before they know that it is past the context."""
    rows = RowTable(num_rows=1, num_pages=3, num_groups=2)
    rows.update(
        [Member("r", 0, 8, [7], is_sampling=False, new_blocks=([4, 5, 6], [NO_BLOCK, NO_BLOCK, 7]))]
    )
    assert rows.blocks[:, 0].tolist() == [[4, 5, 6], [0, 0, 7]]
