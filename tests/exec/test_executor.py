"""The executor with a small random model: memory, launches, compiles, ids on the device."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from orca_jax.exec import expected
from orca_jax.exec.cache import SHARED, page_bytes, size_cache
from orca_jax.exec.compile import memory_of
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.expected import context_factor
from orca_jax.exec.program_store import ProgramStore
from orca_jax.exec.sampling.programs import plain_kinds
from orca_jax.exec.stage import StageModel
from orca_jax.helpers.console import Progress
from orca_jax.model.load import random_decoder, tensor_mesh
from orca_jax.model.stages import whole
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig
from orca_jax.values.errors import CompileWhileServingError, ConfigError
from orca_jax.values.layer_config import LayerKind
from orca_jax.values.platforms import platform_named
from orca_jax.values.startup import StartTimes
from orca_jax.values.step import Member, RowSampling, StepPlan
from tests.programs import compiled_with
from tests.sampling import GREEDY, row_sampling

MODEL = ModelConfig(
    family="gpt2",
    vocab_size=300,
    layers=(LayerKind(),) * 3,
    learned_positions=True,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_dim=64,
    max_positions=64,
    norm="layernorm",
    norm_eps=1e-5,
    activation="gelu_tanh",
    gated_mlp=False,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    tied_embeddings=True,
)
few = pytest.mark.usefixtures("few_programs", "quick_compiles")  # for tests of counts
# for tests of tokens
late = pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
pytestmark = pytest.mark.usefixtures("compiled_once")
NUM_PAGES = 1000  # many, so that a copy of the cache would be visible in the other temporary memory


@functools.cache
def decoder_on(devices: int) -> tuple[Decoder, Mesh]:
    mesh = tensor_mesh(jax.devices()[:devices])
    return random_decoder(MODEL, dtype="float32", mesh=mesh, seed=1), mesh


def make_executor(
    program_cache: str, devices: int = 1, buckets: tuple[int, ...] = (4, 8), strict: bool = False
) -> JaxExecutor:
    decoder, mesh = decoder_on(devices)
    cache = CacheConfig(one_group(MODEL.layer_caches), (NUM_PAGES,), 8, "float32")
    config = ExecutorConfig("float32", devices, buckets, 4, 64, cache, "xla", program_cache, strict)
    return JaxExecutor([StageModel(decoder, mesh)], MODEL, config)


def narrow_executor(program_cache: str) -> JaxExecutor:
    """An executor with the operations that users run, but LLVM's quick work, and no samplers wider than 8 rows."""
    with pytest.MonkeyPatch.context() as patch, compiled_with(optimised=False):
        patch.setattr("orca_jax.exec.buckets._MIN_LARGEST_WIDTH", 8)
        return make_executor(program_cache, buckets=(8,))


def plan(*members: Member) -> StepPlan:
    return StepPlan(0, members)


def generate(
    executor: JaxExecutor,
    prompt: list[int],
    count: int,
    row: int = 0,
    sampling: RowSampling = GREEDY,
) -> list[int]:
    """The tokens of one request, one iteration each, in pages of its own."""
    pages = list(range(row * 8, row * 8 + 8))
    ids = list(prompt)
    member = Member("r", row, 0, ids, is_sampling=True, new_blocks=(pages,), sampling=sampling)
    for _ in range(count):
        [token] = executor.collect(executor.submit(plan(member))).token_ids
        ids.append(token)
        member = Member("r", row, len(ids) - 1, [token], is_sampling=True, num_old_blocks=8)
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def executor(program_cache: str, compiled_once: None) -> JaxExecutor:
    return narrow_executor(program_cache)


PROMPT = [5, 17, 250, 3, 99]


@few
def test_one_sampler_is_enough_for_greedy_requests(
    executor: JaxExecutor, program_cache: str
) -> None:
    """A measurement starts in less time; progress is reported before each program is traced and after it is made."""
    done: list[tuple[int, int]] = []
    decoder, mesh = decoder_on(1)
    config = replace(executor.config, buckets=(8,))
    times = StartTimes()
    progress: Progress = lambda *counts: done.append(counts)  # noqa: E731
    quick = JaxExecutor(
        [StageModel(decoder, mesh)], MODEL, config, progress, greedy_only=True, times=times
    )
    assert {kind for kind, _ in quick.stages[0].programs} == {"layers", "greedy"}
    assert done == sorted(done) and set(done) == {(0, 2), (1, 2), (2, 2)}
    report = times.report()
    assert report.programs == 2 and all(
        report.seconds[phase] > 0 for phase in ("trace", "compile", "warm_up")
    )
    assert generate(quick, PROMPT, 3) == generate(executor, PROMPT, 3)
    quick.close()


def test_the_cache_is_updated_in_place(executor: JaxExecutor) -> None:
    """Donated and aliased: no program holds a second copy of the KV cache, not even of one layer."""
    cache_bytes = NUM_PAGES * page_bytes(MODEL, 8, "float32")
    history_bytes = 4 * 4 * 64
    for (kind, size), program in executor.stages[0].programs.items():
        alias, temp = memory_of(program)
        if kind == "layers":
            assert alias >= cache_bytes + history_bytes, (
                f"bucket {size} does not alias cache and history"
            )
        else:
            assert alias >= 4 * 4, (
                f"the {kind} sampler of width {size} does not alias the last tokens"
            )
        assert temp < cache_bytes / MODEL.num_layers, (
            f"{kind} {size} has temporary memory like a layer's cache"
        )


@late
def test_a_prompt_cut_in_launches_gives_the_same_tokens(
    executor: JaxExecutor, program_cache: str
) -> None:
    whole = generate(executor, PROMPT * 3, 4)
    small = make_executor(program_cache, buckets=(1, 4))
    assert generate(small, PROMPT * 3, 4) == whole
    assert small.stats.launches == 4 + 3, (
        "15 prompt tokens in launches of 4, then one launch per token"
    )
    assert small.stats.padding_tokens == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads programs of XLA:CPU")
def test_no_sampler_sorts_the_vocabulary(executor: JaxExecutor) -> None:
    """`top_k` is a selection only if no other operation is merged with it; a sort takes twenty times as long."""
    for (kind, size), program in executor.stages[0].programs.items():
        text = program.as_text() or ""
        assert kind == "layers" or "TopK" in text
        sorted_columns = [
            int(number) for number in re.findall(r"\(f32\[\d+,(\d+)\][^()]*\) sort\(", text)
        ]
        assert all(number < MODEL.vocab_size for number in sorted_columns), (
            f"the {kind} sampler of width {size} sorts"
        )


@late
@pytest.mark.slow
def test_more_devices_give_the_same_tokens(executor: JaxExecutor, program_cache: str) -> None:
    assert generate(make_executor(program_cache, 4), PROMPT, 6) == generate(executor, PROMPT, 6)


@few
def test_frequent_kinds_of_draws_need_no_branch_and_change_no_token(
    executor: JaxExecutor, program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orca_jax.exec.programs.plain_kinds", lambda platform: plain_kinds(platform_named("gpu"))
    )
    other = make_executor(program_cache)
    assert {name for name, _ in executor.stages[0].programs} == {"layers", "plain", "full"}
    texts = {
        name: str(program.as_text()) for (name, _), program in other.stages[0].programs.items()
    }
    assert [
        kind for kind in plain_kinds(platform_named("gpu")) if "conditional(" in texts[kind]
    ] == ["plain"]
    filtered = Member(
        "d",
        1,
        0,
        [5, 6],
        is_sampling=True,
        new_blocks=([8],),
        sampling=row_sampling(1.0, 0, 0.5, 3),
    )
    results = [x.collect(x.submit(plan(filtered))).token_ids for x in (executor, other)]
    assert results[0] == results[1]
    programs = other.stages[0].programs
    other.stages[0].programs = {
        key: program for key, program in programs.items() if key[0] != "plain"
    }
    for sampling in (GREEDY, row_sampling(1.0, 0, 1.0, 3)):
        assert generate(other, PROMPT, 5, sampling=sampling) == generate(
            executor, PROMPT, 5, sampling=sampling
        )


def test_an_id_on_the_device_needs_no_collect(executor: JaxExecutor) -> None:
    expected = generate(executor, PROMPT, 3)
    member = Member(
        "r", 1, 0, PROMPT, is_sampling=True, new_blocks=(range(8, 16),), sampling=GREEDY
    )
    handles = [executor.submit(plan(member))]
    for position in (5, 6):
        ahead = Member(
            "r", 1, position, [], is_sampling=True, last_on_device=True, num_old_blocks=8
        )
        handles.append(executor.submit(plan(ahead)))
    assert [executor.collect(handle).token_ids[0] for handle in handles] == expected


def test_the_expected_time_counts_what_is_in_flight(executor: JaxExecutor) -> None:
    """Each bucket was measured at start; two launches take longer than one, and nothing is left at the end."""
    assert executor.expected_seconds == 0
    first = Member("r", 1, 0, PROMPT, is_sampling=True, new_blocks=(range(8, 16),), sampling=GREEDY)
    handles = [executor.submit(plan(first))]
    one = executor.expected_seconds
    ahead = Member("r", 1, 5, [], is_sampling=True, last_on_device=True, num_old_blocks=8)
    handles.append(executor.submit(plan(ahead)))
    two = executor.expected_seconds
    assert 0 < one < two
    executor.collect(handles[0])
    assert executor.expected_seconds == pytest.approx(two - one)
    executor.collect(handles[1])
    assert executor.expected_seconds == 0


def test_longer_contexts_are_expected_to_take_longer() -> None:
    """Relative to the parameters of a layer: those of attention (queries, keys, values, output) and of the MLP."""
    layer = 2 * 32 * (32 + 32) + 2 * 32 * 64
    assert context_factor(MODEL, 64) == 1 + 2 * 32 * 64 / layer
    assert context_factor(MODEL, 0) == 1


def test_results_are_in_the_order_of_the_plan(executor: JaxExecutor) -> None:
    """The plan has prompts before increments, the launch increments before prompts."""
    alone = [generate(executor, PROMPT, 2, row=0)[1], generate(executor, [1, 2, 3], 1, row=1)[0]]
    first = generate(executor, PROMPT, 1, row=0)[0]
    both = plan(
        Member("new", 1, 0, [1, 2, 3], is_sampling=True, num_old_blocks=8),
        Member("old", 0, 5, [first], is_sampling=True, num_old_blocks=8),
    )
    assert executor.collect(executor.submit(both)).token_ids == [alone[1], alone[0]]


def test_a_chunk_that_does_not_sample_has_no_result(executor: JaxExecutor) -> None:
    chunk = Member(
        "r", 2, 0, PROMPT[:3], is_sampling=False, new_blocks=(range(16, 24),), sampling=GREEDY
    )
    assert executor.collect(executor.submit(plan(chunk))).token_ids == []
    rest = Member("r", 2, 3, PROMPT[3:], is_sampling=True, num_old_blocks=8)
    assert executor.collect(executor.submit(plan(rest))).token_ids == generate(executor, PROMPT, 1)


def test_nothing_is_compiled_while_serving(executor: JaxExecutor) -> None:
    # the count is of the whole process, with the compilations of other tests
    generate(executor, PROMPT, 1)
    before = executor.stats.compiles_while_serving
    generate(executor, PROMPT, 3)
    assert executor.stats.compiles_while_serving == before


@few
def test_a_compile_while_serving_is_counted_and_strictly_an_error(program_cache: str) -> None:
    lenient, strict = make_executor(program_cache), make_executor(program_cache, strict=True)
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    generate(lenient, PROMPT, 1)
    assert lenient.stats.compiles_while_serving >= 1
    with pytest.raises(CompileWhileServingError, match="compiled after start"):
        generate(strict, PROMPT, 1)


@few
def test_a_later_start_runs_the_smallest_size(
    program_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run, kept = list[int](), JaxExecutor._run_layers, dict[str, bytes]()

    def noting(executor: JaxExecutor, bucket: int, *args: Any) -> jax.Array:
        ran.append(bucket)
        return run(executor, bucket, *args)

    monkeypatch.setattr(JaxExecutor, "_run_layers", noting)
    monkeypatch.setattr(expected, "_BUSY", float("inf"))
    monkeypatch.setattr(ProgramStore, "read", lambda store, name: kept.get(name))
    monkeypatch.setattr(
        ProgramStore, "write", lambda store, name, content: kept.update({name: content})
    )
    first = make_executor(program_cache)
    assert ran == [4, 4, 8], "runs of few rows are short, so there are two"
    ran.clear()
    second = make_executor(program_cache)
    assert ran == [4, 4]
    assert (
        second.launch_seconds == first.launch_seconds
        and second.stats.compiles == first.stats.compiles
    )
    assert generate(second, PROMPT, 2) == generate(first, PROMPT, 2)
    first.close()
    second.close()


@few
def test_sizes_beyond_the_target_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are kept by a start with a shorter target are not enough for a longer one."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(ProgramStore, "read", lambda store, name: kept.get(name))
    monkeypatch.setattr(
        ProgramStore, "write", lambda store, name, content: kept.update({name: content})
    )
    decoder, mesh = decoder_on(1)
    cache = CacheConfig(one_group(MODEL.layer_caches), (NUM_PAGES,), 8, "float32")
    config = ExecutorConfig("float32", 1, (4, 8), 4, 64, cache, "xla", None)
    for target, measured in ((0, {4}), (0, {4}), (9, {4, 8})):
        stages = [StageModel(decoder, mesh)]
        executor = JaxExecutor(
            stages, MODEL, config, is_enough=lambda size, seconds, target=target: seconds > target
        )
        assert executor.launch_seconds.keys() == measured and executor._longest_seconds.keys() == {
            4,
            8,
        }
        assert executor._longest_seconds[8] > executor._longest_seconds[4] or target
        assert executor.stages[0].programs.keys() >= {("layers", 4), ("layers", 8)}, (
            "all sizes exist"
        )
        executor.close()


def test_close_frees_the_cache(program_cache: str) -> None:
    executor = narrow_executor(program_cache)
    pages = jax.tree.leaves(executor.stages[0].state.caches)
    executor.close()
    assert all(pool.is_deleted() for pool in pages)


def test_the_cache_has_as_many_pages_as_fit_and_no_more_than_rows_can_use() -> None:
    one = page_bytes(MODEL, 8, "float32")
    assert one == 2 * 3 * 4 * 8 * 8 * 4
    form, spans = CacheConfig(one_group(MODEL.layer_caches), (), 8, "float32"), [whole(MODEL)]
    sizes = {"num_rows": 4, "max_model_len": 64, "longest": 8}
    fewest = 64 // 8 + 4  # a full request, and a page of each row
    assert size_cache(form, spans, memory=20 * one + 5, **sizes).num_blocks == (20,)
    assert size_cache(form, spans, memory=20 * one + 5, use=SHARED, **sizes).num_blocks == (fewest,)
    assert size_cache(form, spans, memory=28 * one, use=SHARED, **sizes).num_blocks == (12,)
    plenty = size_cache(form, spans, memory=1000 * one, **sizes | {"max_model_len": 60})
    assert plenty.num_blocks == (-(-4 * (60 + 7) // 8),), (
        "four full rows and what reservations waste"
    )
    with pytest.raises(ConfigError, match="lower max_model_len"):
        size_cache(form, spans, memory=3 * one, **sizes)


@late
def test_logits_that_are_not_finite_are_reported_for_their_row_alone(program_cache: str) -> None:
    mesh = tensor_mesh(jax.devices()[:1])
    decoder = random_decoder(MODEL, dtype="float32", mesh=mesh, seed=1)
    table = decoder.embedding.table
    table[...] = table[...].at[7].set(np.nan)
    cache = CacheConfig(one_group(MODEL.layer_caches), (NUM_PAGES,), 8, "float32")
    config = ExecutorConfig("float32", 1, (4, 8), 4, 64, cache, "xla", program_cache)
    executor = JaxExecutor([StageModel(decoder, mesh)], MODEL, config)
    result = executor.collect(
        executor.submit(
            plan(
                Member("bad", 0, 0, [7], is_sampling=True, new_blocks=(range(8),), sampling=GREEDY)
            )
        )
    )
    assert [member.is_finite for member in result.members] == [False]
