"""Copies of blocks: every kind of page, in place, and a request that continues within a copied page."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.compile import memory_of
from orca_jax.exec.executor import JaxExecutor
from orca_jax.kernels.kv_pages import LAYOUTS, copy_blocks, pages_shape
from orca_jax.values.config import PageDType, PageLayout
from orca_jax.values.step import BlockCopy, Member, StepPlan
from tests.covering import slow
from tests.exec.test_groups import PAGE_SIZE, Host, executor_of
from tests.sampling import GREEDY

few = pytest.mark.usefixtures("few_programs", "quick_compiles")
pytestmark = pytest.mark.usefixtures("compiled_when_used")


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_copied_with_its_scales(layout: PageLayout, dtype: PageDType) -> None:
    """Three layers and five blocks; the same copy twice changes nothing."""
    shapes, draw = pages_shape(layout, 15, 2, 4, 8, jnp.dtype(dtype)), np.random.default_rng(0)
    pages = jax.tree.map(
        lambda x: jnp.asarray(draw.integers(0, 100, x.shape)).astype(x.dtype), shapes
    )
    copied = copy_blocks(pages, jnp.array([[1, 4], [0, 2], [0, 2]], jnp.int32), 5)
    for before, after in zip(jax.tree.leaves(pages), jax.tree.leaves(copied), strict=True):
        expected = np.array(before).reshape(3, 5, *before.shape[1:])
        expected[:, 4], expected[:, 2] = expected[:, 1], expected[:, 0]
        assert np.array_equal(np.asarray(after), expected.reshape(before.shape))


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_made_in_place(layout: PageLayout, num_copies: int) -> None:
    """A copy of the cache shows in the temporary memory, or in the bytes that a fused update passes through."""
    num_blocks = 500
    pages = pages_shape(layout, 4 * num_blocks, 2, 8, 16, jnp.dtype("float32"))
    program = jax.jit(partial(copy_blocks, num_blocks=num_blocks), donate_argnums=0)
    compiled = program.lower(pages, jax.ShapeDtypeStruct((num_copies, 2), jnp.int32)).compile()
    alias, temp = memory_of(compiled)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert alias >= size and temp <= 4 * size // num_blocks + 1024
    assert compiled.cost_analysis()["bytes accessed"] < size / 10


@few
@pytest.mark.parametrize(
    ("name", "shards", "stages"),
    [("gemma3-one-kv-head", 1, 1), slow("gemma2", 2, 1), slow("gemma3-one-kv-head", 1, 2)],
)
def test_a_row_continues_within_a_copied_page(
    name: str, shards: int, stages: int, program_cache: str
) -> None:
    """Two rows have the same ten ids, and the second computes those after the ninth alone."""
    first = executor_of(name, "switched", shards, stages, program_cache, "xla", copies=True)
    ids = [int(each) for each in np.random.default_rng(2).integers(3, 97, 10)]
    host = Host(first.config.cache.groups, first.config.cache.num_blocks[0])
    (expected,) = tokens(first, host.member(0, 0, ids, is_sampling=True))
    num_full = 9 // PAGE_SIZE
    shared = [entries[:num_full] for entries in host.entries[0]]
    sources = [entries[num_full] for entries in host.entries[0]]
    targets = [host.free.pop() for _ in sources]
    copies = tuple(
        BlockCopy(group, *pair) for group, pair in enumerate(zip(sources, targets, strict=True))
    )
    blocks = tuple([*entries, target] for entries, target in zip(shared, targets, strict=True))
    member = Member("1", 1, 9, ids[9:], True, False, 0, blocks, GREEDY)
    assert tokens(first, member, copies) == [expected]
    again = Member("0", 0, 9, ids[9:], True, False, len(host.entries[0][0]), ())
    assert tokens(first, again) == [expected], "the source is as it was"
    assert first.stats.compiles_while_serving == 0


def tokens(executor: JaxExecutor, member: Member, copies: tuple[BlockCopy, ...] = ()) -> list[int]:
    plan = StepPlan(0, (member,), copies=copies)
    return list(executor.collect(executor.submit(plan)).members[0].run)
