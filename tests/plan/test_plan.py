"""Plans of deployments: bytes by hand, borders of fitting, times by hand, and the whole command."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.executor import place_model
from orca_jax.assembly.resolve import resolve
from orca_jax.exec.cache import cache_shape, weight_bytes
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.load import Loading, tensor_mesh
from orca_jax.model.stages import spans
from orca_jax.sim.cost import work_of
from orca_jax.tools.plan.__main__ import main
from orca_jax.tools.plan.accelerators import (
    GIB,
    Accelerator,
    PeakShares,
    parse_devices,
)
from orca_jax.tools.plan.memory import Demand, Split, fit, stage_weights
from orca_jax.tools.plan.options import Option, choose, options
from orca_jax.tools.plan.roofline import ALL_REDUCE_SECONDS, RooflineCost, expected_times
from orca_jax.tools.simulate.run import SimulatedRequest, simulate
from orca_jax.values.config import EngineConfig, ModelConfig
from orca_jax.values.layer_config import ExpertsConfig

# 2 layers of 64, 2 heads of 32, MLP 256, 512 ids, 1,024 positions
TINY = read_model_config("preset:gpt2-tiny")
# Norms, queries with keys and values, their projection back, and both layers of the MLP.
TINY_LAYER = 4 * 64 + 3 * (64 * 64 + 64) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
TINY_NUMBERS = 2 * TINY_LAYER + 512 * 64 + 1024 * 64 + 2 * 64  # and the tables, and the last norm
PAGE = 128 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, head dim, bytes
ROWS, LENGTH = 4, 1024
WORKSPACE = 4 * 2048 * (8 * 64 + 3 * 256 + 4 * 64) + 10 * 4 * 64 * 512 + 4 * ROWS * LENGTH
DEMAND = Demand("float32", "float32", 1.0, context=512, max_num_seqs=ROWS, max_model_len=LENGTH)
EXACT = PeakShares(1.0, 1.0, 1.0)


def device(memory: float, flops: float = 1e12, bandwidth: float = 1e9) -> Accelerator:
    return Accelerator("gpu", memory, bandwidth, flops, 1e9, 8, "invented")


def test_weights_by_hand() -> None:
    (whole,) = spans(TINY, 1)
    assert stage_weights(TINY, "float32", 1, whole) == 4 * TINY_NUMBERS == 793_600
    split_layer = 4 * 64 + 3 * (64 * 32 + 32) + (32 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64)
    # half of the vocabulary, all positions
    on_each_of_two = 2 * split_layer + 256 * 64 + 1024 * 64 + 2 * 64
    assert stage_weights(TINY, "bfloat16", 2, whole) == 2 * on_each_of_two
    first, last = spans(TINY, 2)
    assert stage_weights(TINY, "float32", 1, first) == 4 * (TINY_LAYER + 512 * 64 + 1024 * 64)
    # tied: the table again
    assert stage_weights(TINY, "float32", 1, last) == 4 * (TINY_LAYER + 512 * 64 + 2 * 64)


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (4, 1), (2, 3)])
def test_weights_are_those_of_the_engine(model: str, tensor: int, stages: int) -> None:
    config = read_model_config(f"preset:{model}")
    mesh = tensor_mesh(jax.devices()[:tensor])
    for span in spans(config, stages):
        of_engine = weight_bytes(Loading(config, "bfloat16", None, 0).shapes(mesh, span))
        assert stage_weights(config, "bfloat16", tensor, span) == of_engine


def test_the_border_of_fitting() -> None:
    least = LENGTH // 128 + ROWS  # a request of full length, and a partly filled page of each row
    enough = 4 * TINY_NUMBERS + WORKSPACE + least * PAGE
    found = fit(TINY, Split(1, 1), device(enough), DEMAND)
    (stage,) = found.stages
    assert (found.shortage, found.cache.num_blocks[0], found.cache_tokens) == (
        0,
        least,
        128 * least,
    )
    assert (stage.weights, stage.workspace, stage.cache) == (
        4 * TINY_NUMBERS,
        WORKSPACE,
        least * PAGE,
    )
    lacking = fit(TINY, Split(1, 1), device(enough - 1), DEMAND)
    assert (lacking.shortage, lacking.cache.num_blocks[0], lacking.stages[0].cache) == (1, 0, 0)


def test_more_memory_is_not_filled_with_useless_pages() -> None:
    found = fit(TINY, Split(1, 1), device(10 * GIB), DEMAND)
    assert found.cache.num_blocks[0] == ROWS * (LENGTH + 127) // 128 + 1


def test_the_fullest_stage_decides() -> None:
    """Both stages have one layer. The first has the positions as well, so it has less memory for pages."""
    first = 4 * (TINY_LAYER + 512 * 64 + 1024 * 64)
    least = LENGTH // 128 + 2 * ROWS  # each stage has a batch
    workspace = WORKSPACE + 4 * ROWS * LENGTH  # a longer history
    found = fit(TINY, Split(1, 2), device(first + workspace + least * PAGE // 2), DEMAND)
    assert (found.shortage, found.cache.num_blocks[0]) == (0, least)
    assert [stage.cache for stage in found.stages] == [least * PAGE // 2] * 2
    assert (
        fit(TINY, Split(1, 2), device(first + workspace + least * PAGE // 2 - 1), DEMAND).shortage
        == 1
    )


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_pages_are_those_of_the_engine(
    tensor: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, memory = tensor * stages, 3 * GIB // 100
    monkeypatch.setattr("orca_jax.exec.host.free_memory", lambda: memory)
    config = EngineConfig(
        max_num_seqs=16, tensor_parallel_size=tensor, pipeline_parallel_size=stages
    )
    devices = jax.devices()[:number]
    placed = place_model(
        "preset:gpt2-tiny",
        TINY,
        dtype="float32",
        load_format="auto",
        seed=0,
        devices=devices,
        num_stages=stages,
    )
    cache = resolve(choices_of(config), LENGTH, placed).cache
    kind = Accelerator("cpu", memory / number, 0, 0, 0, number, "this machine")
    planned = fit(
        TINY, Split(tensor, stages), kind, replace(DEMAND, max_num_seqs=16, utilization=0.9)
    )
    assert (planned.shortage, planned.cache.num_blocks[0]) == (0, cache.num_blocks[0])


def test_rows_and_length_are_chosen_by_memory() -> None:
    free = replace(DEMAND, max_num_seqs=None, max_model_len=None)
    assert fit(TINY, Split(1, 1), device(10 * GIB), free).rows == 256
    small = fit(TINY, Split(1, 1), device(4 * TINY_NUMBERS + WORKSPACE + 40 * PAGE), free)
    # Eight rows of 512 tokens take 32 pages, and 16 rows more than there are.
    assert (small.rows, small.max_model_len) == (8, 1024)
    long = replace(TINY, max_positions=8192)
    short = fit(
        long, Split(1, 1), device(4 * TINY_NUMBERS + 4 * 7168 * 64 + WORKSPACE + 40 * PAGE), free
    )
    # Eight rows would need 32 + 8 pages, and their longer history takes the last of the 40.
    assert (short.rows, short.max_model_len) == (4, 4096)


def test_times_by_hand() -> None:
    """With slow memory each part takes its bytes by the bandwidth, and with slow arithmetic its operations."""
    table, layers = 512 * 64, TINY_NUMBERS - 512 * 64
    slot = 2 * 2 * 2 * 32 * 4
    memory = fit(TINY, Split(1, 1), device(10 * GIB), DEMAND)
    times = expected_times(TINY, memory, device(10 * GIB, flops=1e18), DEMAND, 100, EXACT)
    interval = (4 * (layers + table) + ROWS * 512 * slot) / 1e9
    assert times.token_seconds == pytest.approx(interval)
    assert times.tokens_per_second == pytest.approx(ROWS / interval)
    times = expected_times(
        TINY, memory, device(10 * GIB, flops=1e9, bandwidth=1e18), DEMAND, 100, EXACT
    )
    pairs = 100 * 101 / 2
    assert times.prompt_seconds == pytest.approx(
        (2 * 100 * layers + 2 * 4 * 2 * 32 * pairs + 2 * table) / 1e9
    )


def test_the_slower_stage_sets_the_pace() -> None:
    """Two batches follow each other through two stages."""
    memory = fit(TINY, Split(1, 2), device(10 * GIB), DEMAND)
    times = expected_times(TINY, memory, device(10 * GIB, flops=1e18), DEMAND, 100, EXACT)
    slot = 2 * 2 * 32 * 4
    last = (4 * (TINY_LAYER + 2 * 64 + 512 * 64) + ROWS * 512 * slot) / 1e9
    first = (4 * (TINY_LAYER + 1024 * 64) + ROWS * 512 * slot) / 1e9
    assert times.token_seconds == pytest.approx(2 * max(first, last))
    assert times.tokens_per_second == pytest.approx(2 * ROWS / times.token_seconds)


def test_a_simulation_takes_the_times_of_a_plan() -> None:
    """Two stages with slow memory: a prompt takes its time, and the next token that of a batch of one."""
    memory = fit(TINY, Split(1, 2), device(10 * GIB), DEMAND)
    kind = device(10 * GIB, flops=1e12)
    times = expected_times(TINY, memory, kind, DEMAND, 100, EXACT)
    cost = RooflineCost(TINY, memory, kind, DEMAND, EXACT)
    found = simulate(
        "orca", [SimulatedRequest(0.0, 100, 2)], cost, max_num_seqs=1, pipeline_parallel_size=2
    )
    (record,) = found.records
    assert record.first_token == pytest.approx(times.prompt_seconds)
    one = work_of([(100, 1, True)], 1)._replace(members=1)
    assert record.end is not None and record.first_token is not None
    assert record.end - record.first_token == pytest.approx(sum(cost.stages(one, 2)))


def test_an_iteration_reads_the_experts_in_use() -> None:
    """A token goes through 2 of 8 experts; an iteration of four tokens reads 1 - 0.75 ** 4 of all."""
    one = replace(TINY, gated_mlp=True, tied_embeddings=False)
    many = replace(one, experts=ExpertsConfig(8, 2))
    expert = 2 * 3 * 64 * 256 * 4  # layers, products, bytes
    read = device(10 * GIB, flops=1e30)._replace(platform="tpu")
    for model, experts in ((one, 0.0), (many, 8 * (1 - 0.75**ROWS))):
        memory = fit(model, Split(1, 1), read, DEMAND)
        times = expected_times(model, memory, read, DEMAND, 100, EXACT)
        (stage,) = memory.stages
        # less the embedding's table
        rest = stage.weights - 512 * 64 * 4 - (8 * expert if model.experts else 0)
        cache = ROWS * 512 * 2 * 2 * 64 * 4
        assert times.token_seconds == pytest.approx((rest + experts * expert + cache) / 1e9)
    work = device(10 * GIB, bandwidth=1e30)._replace(platform="tpu")
    seconds = [
        expected_times(
            model, fit(model, Split(1, 1), work, DEMAND), work, DEMAND, 100, EXACT
        ).token_seconds
        for model in (replace(one, experts=ExpertsConfig(8, active)) for active in (2, 3))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * ROWS * expert / 4 / 1e12)


def test_every_platform_computes_the_chosen_experts() -> None:
    sizes = replace(TINY, gated_mlp=True, tied_embeddings=False)
    work = device(10 * GIB, bandwidth=1e30)
    times = [
        expected_times(model, fit(model, Split(1, 1), kind, DEMAND), kind, DEMAND, 100, EXACT)
        for kind in (work._replace(platform=platform) for platform in ("gpu", "tpu", "cpu"))
        for model in (replace(sizes, experts=ExpertsConfig(8, active)) for active in (1, 8))
    ]
    assert times[0] == times[2] == times[4]
    assert times[0].token_seconds < times[1].token_seconds == times[3].token_seconds


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_states_are_read_and_written(tensor: int, stages: int) -> None:
    """Two layers with convolutions of three taps keep two inputs of 64 numbers, and two with attention keep pages."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
    }
    model = config_from_hf({"model_type": "lfm3", "intermediate_size": 256, **sizes, **layers})
    memory = fit(model, Split(tensor, stages), device(10 * GIB), DEMAND)
    times = expected_times(model, memory, device(10 * GIB, flops=1e30), DEMAND, 100, EXACT)
    state, slot = 2 * 64 * 4, 2 * 2 * 32 * 4
    last = memory.stages[-1].weights + ROWS * (512 * slot + 2 * state) * (2 // stages) // tensor
    sums = 0 if tensor == 1 else 2 * 4 * (2 * 1 / 2 * ROWS * 64 * 4 / 1e9 + ALL_REDUCE_SECONDS)
    assert times.token_seconds == pytest.approx(stages * last / 1e9 + sums)


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_device_reads_the_latents_of_all_tokens(tensor: int) -> None:
    """A token has 12 numbers of a latent and 4 of a rotated key in each of three layers, whatever the heads."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    latents = {
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "q_lora_rank": None,
        "num_hidden_layers": 3,
    }
    model = config_from_hf({"model_type": "youtu", "intermediate_size": 256, **sizes, **latents})
    memory = fit(model, Split(tensor, 1), device(10 * GIB), DEMAND)
    times = expected_times(model, memory, device(10 * GIB, flops=1e30), DEMAND, 100, EXACT)
    read = memory.stages[0].weights + ROWS * 512 * 3 * (12 + 4) * 4
    sums = 0 if tensor == 1 else 2 * 3 * (2 * 1 / 2 * ROWS * 64 * 4 / 1e9 + ALL_REDUCE_SECONDS)
    assert times.token_seconds == pytest.approx(read / 1e9 + sums)
    (shape,) = cache_shape(memory.cache)
    page = sum(math.prod(array.shape) * 4 for array in jax.tree.leaves(shape))
    assert (
        page == tensor * memory.cache.num_blocks[0] * memory.cache.page_size * 3 * (12 + 4) * 4
    ), "as allocated"


def test_sums_over_devices_take_time() -> None:
    memory = fit(TINY, Split(2, 1), device(10 * GIB), DEMAND)
    fast = device(10 * GIB, flops=1e30, bandwidth=1e30)
    sent = 2 * 1 / 2 * ROWS * 64 * 4
    times = expected_times(TINY, memory, fast, DEMAND, 100, EXACT)
    assert times.token_seconds == pytest.approx(4 * (sent / 1e9 + ALL_REDUCE_SECONDS))


def plan(model: ModelConfig, devices: str) -> list[Option]:
    return options(
        model, parse_devices(devices), Demand("bfloat16", "bfloat16", 0.9), 512, PeakShares()
    )


def test_a_small_model_gets_replicas() -> None:
    chosen = choose(plan(read_model_config("preset:llama-3-8b"), "h200x8"), 100.0)
    assert chosen is not None
    assert (chosen.replicas, chosen.memory.split, chosen.nodes) == (8, Split(1, 1), 1)
    assert chosen.flags()[:4] == ["--tensor-parallel-size", "1", "--max-num-seqs", "256"]


def test_a_large_model_gets_two_hosts() -> None:
    chosen = choose(plan(read_model_config("preset:gpt3-341b"), "a100-80x16"), 100.0)
    assert chosen is not None
    assert chosen.memory.split == Split(8, 2)
    assert chosen.flags()[:6] == [
        *("--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--nnodes", "2"),
    ]  # fmt: skip


def test_a_target_out_of_reach_gives_the_fastest() -> None:
    found = plan(read_model_config("preset:llama-3-8b"), "h200x8")
    chosen = choose(found, 1e-3)
    assert chosen is not None and chosen.times is not None
    assert chosen.times.token_seconds == min(
        option.times.token_seconds for option in found if option.times
    )


def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 4, "eos_token_id": 1})
    )
    for model in (tmp_path, tmp_path / "config.json"):
        assert (
            main(["--model", str(model), "--devices", "h200x2", "--max-num-seqs", "8", "--json"])
            == 0
        )
        table, last = capsys.readouterr().out.strip().rsplit("\n", 1)
        found = json.loads(last)
        assert found["chosen"]["replicas"] == 2 and found["chosen"]["max_num_seqs"] == 8
        assert len(found["options"]) == 3  # two copies, two stages, two shards
        assert "start 2 replicas" in table
        assert (
            f"--model {tmp_path} --tensor-parallel-size 1 --max-num-seqs 8 --max-model-len 1024"
            in table
        )


def test_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "preset:gpt3-175b", "--devices", "v5ex4"]) == 1
    printed = capsys.readouterr().out
    assert "tensor 4, 1 stage: does not fit; a device lacks" in printed
    assert "tensor 1, 4 stages or fewer: does not fit" in printed
    assert "use more or larger devices" in printed


def test_this_machine_has_memory_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--model", "preset:gpt2-tiny", "--devices", "cpu", "--max-num-seqs", "2", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["demand"]["dtype"] == "float32"
    assert found["chosen"]["times"] is None
    assert np.prod([found["chosen"]["pipeline_parallel_size"], found["chosen"]["nnodes"]]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "h300x8"], "did you mean h200"),
        (["--devices", "h200", "--model", "preset:gpt5"], "unknown preset 'gpt5'"),
        (
            ["--devices", "h200", "--max-model-len", "99999"],
            "more than the model's 1024 positions; lower it",
        ),
        (["--devices", "h200", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (
            ["--devices", "h200", "--gpu-memory-utilization", "1.5"],
            "gpu_memory_utilization must be in (0, 1]",
        ),
        (["--devices", "h200", "--flops-share", "0"], "flops_share must be in (0, 1]"),
        (["--devices", "h200", "--itl-target-ms", "0"], "itl_target_ms must be above 0"),
        (["--devices", "h200x1", "--revision", "v1"], "revision has no effect on preset:gpt2"),
    ],
)
def test_wrong_flags_are_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "preset:gpt2", *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_device_is_opened() -> None:
    program = (
        "from orca_jax.tools.plan.__main__ import main\n"
        "from orca_jax.exec.memory import has_jax_started\n"
        "assert main(['--model', 'preset:gpt2', '--devices', 'v5e-4']) == 0\n"
        "assert not has_jax_started()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
