"""Requests with adapters get the tokens of the merged model, under every scheduler, mesh and batch."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.model.load import load_decoder
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import RequestUpdate, SamplingParams
from tests.lora.directories import ADAPTERS, LLAMA, RECORDED, merge, write_adapter
from tests.model.reference import REFERENCE, mesh_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("compiled_once", "few_programs", "quick_compiles"),
]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def engine_of(model: Path | str, cache: str, **settings: object) -> Iterator[Built]:
    sizes = {"max_num_seqs": 8, "page_size": 8, "num_pages": 80, "max_num_batched_tokens": 16}
    fixed = {"dtype": "float32", "tokenizer": "byte", "compile_cache": cache, "progress": False}
    values = {"tensor_parallel_size": 1, "strict_compile": True, **fixed, **sizes, **settings}
    with build_engine(EngineConfig(model=str(model), **values)) as built:  # type: ignore[arg-type]
        yield built
        pool = built.engine.pool
        pool.check_integrity()
        assert not built.engine.has_work and (pool.kv.num_free_blocks,) == pool.kv.num_blocks
        assert built.engine.executor.stats.compiles_while_serving == 0


def run(built: Built) -> dict[str, list[RequestUpdate]]:
    """The updates of each request added so far."""
    updates: dict[str, list[RequestUpdate]] = {}
    while built.engine.has_work:
        for update in built.engine.step():
            updates.setdefault(update.request_id, []).append(update)
    return updates


def tokens(updates: list[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.new_ids]


def prompts_of(name: str) -> list[list[int]]:
    stored = np.load(REFERENCE / name / "expected.npz")
    return [stored[f"ids_{number}"].tolist() for number in range(4)]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", RECORDED)
def test_tokens_equal_those_of_peft(name: str, devices: int, program_cache: str) -> None:
    """Requests with the adapter, and without one, in the same batches."""
    base = RECORDED[name]
    if devices == 4 and base not in (LLAMA, "gpt2-12-heads"):
        pytest.skip("the widths of this model are too small for four devices")
    plain, adapted = (
        np.load(REFERENCE / base / "expected.npz"),
        np.load(ADAPTERS / name / "expected.npz"),
    )
    settings = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 4,
        "lora_modules": (f"x={ADAPTERS / name}",),
    }
    for built in engine_of(
        REFERENCE / base, program_cache, tensor_parallel_size=devices, **settings
    ):
        for number, ids in enumerate(prompts_of(base)):
            built.engine.add_request(f"plain {number}", ids, GREEDY)
            built.engine.add_request(f"adapted {number}", ids, GREEDY, adapter="x")
        found = {request_id: tokens(updates) for request_id, updates in run(built).items()}
        for number in range(4):
            assert found[f"plain {number}"] == plain[f"greedy_{number}"].tolist()
            assert found[f"adapted {number}"] == adapted[f"greedy_{number}"].tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """32 adapters of different ranks and targets."""
    folder = tmp_path_factory.mktemp("adapters")
    attention = ("self_attn.q_proj", "self_attn.v_proj")
    return [
        write_adapter(
            folder / str(number),
            number,
            rank=1 + number % 4,
            **({} if number % 3 else {"targets": attention}),
        )
        for number in range(32)
    ]


SCORED = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)


def merged_answers(adapters: list[Path], folder: Path, cache: str) -> list[list[RequestUpdate]]:
    """The answer of each merged model to a prompt of its own."""
    merged = [
        merge(adapter, folder / f"merged {number}") for number, adapter in enumerate(adapters)
    ]
    # loading compiles programs, which an engine would count
    trees = [tree_of(directory, 211) for directory in merged]
    answers = []
    for built in engine_of(REFERENCE / LLAMA, cache):
        for number, tree in enumerate(trees):
            built.engine.update_weights(partial(built.prepare_update(tree), lambda: None))
            built.engine.add_request("0", prompt_of(number), SCORED)
            answers.append(run(built)["0"])
    return answers


def tree_of(directory: Path, vocab_size: int) -> dict[str, Any]:
    """The parameters of a model, without the padding of its vocabulary."""
    tree: dict[str, Any] = nnx.to_pure_dict(
        nnx.state(load_decoder(str(directory), dtype="float32", mesh=mesh_of(1)))
    )
    for name in ("embedding", "head"):
        tree[name]["table"] = np.asarray(tree[name]["table"])[:vocab_size]
    return tree


def prompt_of(number: int) -> list[int]:
    return [Random(number).randrange(200) for _ in range(3 + number % 7)]


def test_32_adapters_in_one_batch_equal_the_merged_models(
    adapters: list[Path], tmp_path: Path, program_cache: str
) -> None:
    expected = merged_answers(adapters, tmp_path, program_cache)
    modules = tuple(f"{number}={path}" for number, path in enumerate(adapters))
    settings = {
        "enable_lora": True,
        "max_loras": 32,
        "max_lora_rank": 4,
        "lora_modules": modules,
        "max_num_seqs": 32,
    }
    for devices, stages in ((1, 1), (2, 1), (1, 2)):
        mesh = {"tensor_parallel_size": devices, "pipeline_parallel_size": stages}
        for built in engine_of(
            REFERENCE / LLAMA, program_cache, max_num_batched_tokens=256, **mesh, **settings
        ):
            for number in range(32):
                built.engine.add_request(
                    str(number), prompt_of(number), SCORED, adapter=str(number)
                )
            found = run(built)
            # Each stage of a pipeline has a batch of its own.
            assert built.engine.stats.mean_batch_size > 31 / stages, (
                "all requests are in the batches"
            )
        for number, updates in enumerate(expected):
            assert tokens(found[str(number)]) == tokens(updates), (devices, stages, number)
            ours, theirs = (
                [one.logprob for each in run for one in each.logprobs]
                for run in (found[str(number)], updates)
            )
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        ("orca", {}),
        ("request_level", {}),
        ("chunked", {}),
        ("chunked", {"num_pages": 14}),
        ("chunked", {"check_in_interval": 3}),
    ],
    ids=["orca", "request_level", "chunked", "preempting", "many ahead"],
)
def test_loaded_and_evicted_200_times_under_load(
    scheduler: str, settings: dict[str, object], adapters: list[Path], program_cache: str
) -> None:
    """Each request gets the tokens that it gets alone. Nothing is compiled, and no page is lost."""
    random, expected, names = Random(7), dict[str, str](), dict[str, int]()
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 6}
    for built in engine_of(
        REFERENCE / LLAMA, program_cache, scheduler=scheduler, **lora, **settings
    ):
        engine, read = built.engine, built.read_adapter
        assert read is not None and isinstance(engine.executor, JaxExecutor)
        alone: dict[int, list[int]] = {}
        for number in range(8):
            read("one", str(adapters[number])).add_to(engine)
            engine.add_request("0", [1, 2, 3], GREEDY, adapter="one")
            engine.remove_adapter("one")
            alone[number] = tokens(run(built)["0"])
        assert len({tuple(answer) for answer in alone.values()}) == 8
        found: dict[str, list[int]] = {}
        for turn in range(200):
            name, number = random.choice("abcd"), random.randrange(8)
            if name in names:
                engine.remove_adapter(name)
            read(name, str(adapters[number])).add_to(engine)
            names[name] = number
            chosen = random.choice(list(names))
            engine.add_request(str(turn), [1, 2, 3], GREEDY, adapter=chosen)
            expected[str(turn)] = names[chosen]
            for _ in range(random.choice((0, 2, 5))):
                for update in engine.step():
                    found.setdefault(update.request_id, []).extend(update.new_ids)
        for request_id, updates in run(built).items():
            found.setdefault(request_id, []).extend(tokens(updates))
        assert {turn: alone[number] for turn, number in expected.items()} == found
        assert len(engine.executor.adapters) <= len(names)
