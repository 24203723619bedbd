"""Costs from measured kernels of a card: hand-computed sums, rules between points, and flags that are refused."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.sim.cost import WorkCounts, work_of
from orca_jax.tools.plan.kernels import Kernels, Plane, nearest_heads
from orca_jax.tools.plan.measured import Grid, read_rows, stepped
from orca_jax.tools.plan.tables import PLAIN, TablesCost, read_tables
from orca_jax.tools.simulate.__main__ import main
from orca_jax.values.errors import ConfigError

HEADS = "heads,kv_heads,batch,tokens,us"
PREFILL = "20,20,{batch},{tokens},{us}"


def written(folder: Path, **changes: str) -> str:
    """The flag of tables for GPT of 13B on two devices: products n k m / 2^30 us plus 1 us."""
    sizes = (64, 65_536)
    tables = {
        "gemm_vllm": ["n,k,m,us"]
        + [f"{n},{k},{m},{1 + n * k * m / 2**30}" for n in sizes for k in sizes for m in (1, 1024)],
        "context_attention_vllm": [HEADS]
        + [f"20,20,{b},{t},{b * t * t}" for b in (1, 4) for t in (16, 64)],
        "generation_attention_vllm": [HEADS]
        + [f"20,20,{b},{t},{10 + b * t}" for b in (1, 4) for t in (2, 1024)],
        "collectives": ["source,op,gpus,bytes,us"]
        + [
            f"{name},{size},{us}"
            for name, us in (("nccl 2,all_reduce,2", 40), ("vllm 1,all_reduce_graph,2", 4))
            for size in (256, 2**30)
        ],
    }
    for name, lines in tables.items():
        text = changes.get(name, "\n".join(lines) + "\n")
        (folder / f"a100_sxm_{name}.csv").write_text(text, encoding="utf-8")
    return f"tables:{folder},card=a100_sxm,source=vllm,model=preset:gpt3-13b,tensor=2"


def microseconds(cost: TablesCost, work: WorkCounts, num_stages: int = 1) -> list[float]:
    return [1e6 * each for each in cost.stages(work, num_stages)]


def products(num_tokens: int, draws: int) -> tuple[float, float]:
    """Microseconds of a layer's products, and of the unembedding: width 5,120, two devices."""
    weights = 12 * 5120**2 / 2
    return 4 + weights * num_tokens / 2**30, 1 + 50_257 / 2 * 5120 * draws / 2**30


def plain(num_tokens: int, draws: int) -> tuple[float, float]:
    """Microseconds by bytes of a layer, and of embeddings and logits."""
    of_token = 2 * (8 * 5120 + (6 * 5120 + 2 * 20_480) / 2)
    once = 2 * 2 * 5120 * num_tokens + 2 * draws * 50_257 / 2
    return of_token * num_tokens / 2.039e6, once / 2.039e6


def expected(num_tokens: int, draws: int, attention: float, sums: float = 4) -> float:
    of_layer, unembedding = products(num_tokens, draws)
    bytes_of_layer, once = plain(num_tokens, draws)
    drawn = unembedding if draws else 0
    of_layer += bytes_of_layer + PLAIN * (1 + 64 * 64 / 2**30)
    return 40 * (of_layer + attention + 2 * sums) + drawn + once


def test_increments_and_prompts(tmp_path: Path) -> None:
    """Three increments with 100 tokens each, and two prompts of 32: attention by the square of a prompt's tokens."""
    cost = read_tables(written(tmp_path))
    members = [(99, 1, True)] * 3 + [(0, 32, False)] * 2
    work = work_of(members, 5)._replace(members=5)
    attention = (10 + 3 * 100) + 2 * 32**2
    assert microseconds(cost, work) == [pytest.approx(expected(67, 5, attention))]
    assert cost.num_outside == 0


def test_attention_by_request(tmp_path: Path) -> None:
    cost = read_tables(written(tmp_path) + ",attention=request,sums=nccl,host=0.5")
    work = work_of([(99, 1, True)] * 3, 3)._replace(members=3)
    assert microseconds(cost, work) == [pytest.approx(expected(3, 3, 3 * 110, 40))]
    assert cost.host == 0.5


def test_products_in_whole_tiles(tmp_path: Path) -> None:
    """Tokens count up to the next point, or to the next multiple of the tile."""
    assert stepped({1: 1.0, 4: 4.0, 12: 12.0}, 8) == {1: 1, 2: 4, 4: 4, 5: 8, 8: 8, 9: 12, 12: 12}
    cost = read_tables(written(tmp_path) + ",tile=128")
    seconds = cost.products[0].seconds
    assert (
        seconds.at(129)
        == seconds.at(256)
        == read_tables(written(tmp_path)).products[0].seconds.at(256)
    )


def test_a_later_chunk_is_the_rest_of_its_prompt(tmp_path: Path) -> None:
    cost = read_tables(written(tmp_path))
    work = work_of([(32, 32, False)])._replace(members=1)
    assert microseconds(cost, work) == [pytest.approx(expected(32, 0, 64**2 - 32**2))]


def test_stages_and_hops(tmp_path: Path) -> None:
    cost = read_tables(written(tmp_path) + ",hop=3e-6,link=1e9")
    work = work_of([(99, 1, True)], 1)._replace(members=1)
    first, last = microseconds(cost, work, 2)
    (whole,) = microseconds(cost, work)
    hop = 3 + 5120 * 2 / 1e3
    assert first + last == pytest.approx(whole + hop)
    assert first - last == pytest.approx(
        hop + 2 * 5120 * 2 / 2.039e6 - products(1, 1)[1] - 50_257 / 2.039e6
    )


def test_another_bandwidth(tmp_path: Path) -> None:
    """On half the bandwidth products of few tokens take twice as long, and those of many as long as before."""
    text = written(tmp_path)
    ours = read_tables(text)
    slow = read_tables(text + ",bandwidth=1.0195e12")
    few = ours.products[0].seconds.at(1)
    assert slow._product(slow.products[0], 1) == pytest.approx(2 * few)
    many = ours.products[0].seconds.at(1024)
    assert slow._product(slow.products[0], 1024) == pytest.approx(many)


def test_experts_are_read_once(tmp_path: Path) -> None:
    """A token reads its eight of 128 experts, and a second one few more than eight further ones."""
    cost = read_tables(written(tmp_path))
    assert cost._experts(1) == 0
    model = read_model_config("preset:qwen3-30b-a3b")
    experts = replace(cost, model=model, settings=replace(cost.settings, tensor=1))
    weights = 3 * model.embed_dim * model.mlp_dim
    assert experts._experts(1) == pytest.approx(8 * weights * 2 / 2.039e12)
    assert experts._experts(2) == pytest.approx((16 - 0.5) * weights * 2 / 2.039e12)


def test_heads_that_a_table_lacks() -> None:
    known = [(8, 8), (12, 12), (16, 4), (24, 4), (4, 1)]
    assert nearest_heads(known, 20, 4) == ({(16, 4): 0.5, (24, 4): 0.5}, 1.0)
    assert nearest_heads(known, 10, 10) == ({(8, 8): 0.5, (12, 12): 0.5}, 1.0)
    assert nearest_heads(known, 24, 24) == ({(12, 12): 1.0}, 2.0)
    assert nearest_heads(known, 7, 2) == ({}, 1.0)


def test_lookups_beyond_the_points(tmp_path: Path) -> None:
    """Products and increments grow in proportion, prompts by the square of their tokens; all are counted."""
    assert Grid({(2, 2): 3.0, (4, 2): 6.0}).grown((8, 4)) == 24
    prompts = Plane({16: {1: 1.0}, 64: {1: 16.0}}, is_of_prompts=True)
    assert (prompts.at(1, 128), prompts.at(2, 64), prompts.num_outside) == (64, 32, 2)
    increments = Plane({16: {1: 1.0}, 64: {1: 16.0}}, is_of_prompts=False)
    assert (increments.at(1, 128), increments.at(1, 8), increments.num_outside) == (32, 1, 2)
    written(tmp_path)
    wide = Kernels(tmp_path, "a100_sxm", "vllm").product(131_072, 64)
    wide.at(1)
    assert wide.num_outside == 1


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (",card=b100", "card must be one of a100_sxm"),
        (",tensor=4", "no heads like 10 with 10"),
        (",tensor=3", "whole heads"),
        (",tensor=0", "numbers above 0"),
        (",tile=0", "numbers above 0"),
        (",host=nan", "host must be at least 0"),
        (",kind=int4", "kind must be one of"),
        (",kind=fp8", "a100_sxm_gemm_vllm_fp8.csv cannot be read"),
        (",sums=mpi", "sums must be one of own, nccl"),
        (",attention=none", "attention must be one of fused, request"),
        (",model=preset:gpt9", "model: unknown preset"),
        (",model=preset:distilgpt2", "heads of 128"),
        (",model=", "cost must be tables:DIR"),
        (",speed=9", "cost must be tables:DIR"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, end: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_tables(written(tmp_path) + end)
    assert raised.value.param == "cost"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gemm_vllm", "n,k,m,ms\n1,1,1,1\n", r"gemm_vllm.csv: line 1 must be n,k,m,time_us"),
        ("gemm_vllm", "n,k,us\n1,1,1\n", "line 1 must be"),
        ("gemm_vllm", "n,k,m,us\n1,1,1,2\n1,1,1,2\n", "line 3 repeats"),
        ("gemm_vllm", "n,k,m,us\n1,1,1,2\n1,1,2,nan\n", "line 3 must end with microseconds"),
        ("collectives", "source,op,gpus,bytes,us\nnccl,all_reduce,2,1\n", "line 2 must have 5"),
        ("context_attention_vllm", f"{HEADS}\n3,2,1,1,1\n", "no heads like 20 with 20"),
        ("generation_attention_vllm", f"{HEADS}\n20,20,1,x,1\n", "line 2 must have whole numbers"),
    ],
)
def test_wrong_tables_are_refused_by_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tables(written(tmp_path, **{name: text}))


def test_a_million_rows_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("n,k,m,us\n" + "1,1,1,2.5\n" * 10**6, encoding="utf-8")
    begin = time.process_time()
    with pytest.raises(ConfigError, match="200000 lines"):
        list(read_rows(path, ("n", "k", "m")))
    assert time.process_time() - begin < 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = written(tmp_path)
    assert main(["chunked", "--num-requests", "3", "--cost", cost, "--jobs", "1"]) == 0
    assert '"lookups_outside": ' in capsys.readouterr().out
    assert main(["chunked", "--cost", cost + ",card=cpu"]) == 2
    assert "card must be one of" in capsys.readouterr().err


def test_products_of_eight_bits_have_a_table(tmp_path: Path) -> None:
    cost = written(tmp_path)
    table = (tmp_path / "a100_sxm_gemm_vllm.csv").read_text(encoding="utf-8")
    (tmp_path / "a100_sxm_gemm_vllm_fp8.csv").write_text(
        table.replace("64,64,1,", "64,64,1,9"), encoding="utf-8"
    )
    small = read_tables(cost + ",kind=fp8")
    assert small.products[0].seconds.at(1) > read_tables(cost).products[0].seconds.at(1)


def test_sums_over_too_many_devices(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError, match="no all_reduce over 8 devices"):
        Kernels(tmp_path, "a100_sxm", "vllm").all_reduce(8)
