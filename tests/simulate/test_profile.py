"""Costs from measured operators: hand-computed sums, and tables that are refused by line."""

import gzip
from pathlib import Path

import pytest

from lab.gpus import command, plans
from lab.gpus.runs import QWEN3_32B, GpuRun, Limits
from orca_jax.sim.cost import WorkCounts, work_of
from orca_jax.tools.plan import measured
from orca_jax.tools.plan.measured import Curve, Grid
from orca_jax.tools.plan.profile import ProfileCost, read_profile
from orca_jax.tools.simulate.__main__ import main
from orca_jax.values.errors import ConfigError

DENSE = """layer,tokens,time_us
embedding,1,10
embedding,101,110
layernorm,1,1
layernorm,101,1
down_proj,1,20
down_proj,101,220
"""
PER_SEQUENCE = """layer,sequences,time_us
lm_head,1,1000
lm_head,11,2000
"""
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,5
0,0,4,16,8
0,0,1,32,7
0,0,4,32,12
0,0,8,16,20
16,0,0,0,30
16,0,1,16,33
16,0,4,16,36
16,16,0,0,40
64,0,0,0,100
"""
MOE = """tokens,activated_experts,time_us
1,2,50
1,4,90
9,2,60
9,4,100
"""


def written(folder: Path, **changes: str) -> str:
    """The prefix of a profile with two layers."""
    tables = {"dense": DENSE, "per_sequence": PER_SEQUENCE, "attention": ATTENTION, **changes}
    for name, text in tables.items():
        (folder / f"toy_{name}.csv").write_text(text, encoding="utf-8")
    return f"profile:{folder}/toy,layers=2"


def microseconds(cost: ProfileCost, work: WorkCounts) -> float:
    (seconds,) = cost.stages(work, 1)
    return seconds * 1e6


def test_an_iteration_of_increments(tmp_path: Path) -> None:
    """Four increments with 24 tokens of context: the mean of 8 and 12 us of attention in each layer."""
    cost = read_profile(written(tmp_path))
    work = work_of([(23, 1, True)] * 4, num_draws=4)
    of_layer = (20 + 3 * 2) + 2 * 1 + 10
    assert microseconds(cost, work) == pytest.approx(2 * of_layer + (10 + 3) + 1300)
    assert cost.num_outside == 0


def test_chunks_beside_increments(tmp_path: Path) -> None:
    """More increments beside a chunk than a table has count as those with as many tokens of context."""
    cost = read_profile(written(tmp_path))
    chunk = (0, 16, False)
    one = microseconds(cost, work_of([chunk, (15, 1, True)], num_draws=1))
    assert one == pytest.approx(2 * ((20 + 32) + 2 + 33) + 26 + 1000)
    eight = work_of([chunk, *[(7, 1, True)] * 8], num_draws=8)
    assert microseconds(cost, eight) == pytest.approx(2 * ((20 + 46) + 2 + 36) + 33 + 1700)


def test_a_later_chunk_has_tokens_before_it(tmp_path: Path) -> None:
    cost = read_profile(written(tmp_path))
    work = work_of([(8, 16, False)])
    assert microseconds(cost, work) == pytest.approx(2 * ((20 + 30) + 2 + 35) + 25 + 1000)


def test_experts_sums_and_hosts(tmp_path: Path) -> None:
    """One token names two of four experts; two devices sum 64 bytes twice."""
    text = written(tmp_path, moe=MOE)
    cost = read_profile(
        f"{text},experts=4,active=2,host=0.5,devices=2,width=32,bandwidth=64e6,hop=3e-6"
    )
    assert cost.host == 0.5
    plain = microseconds(read_profile(text), work_of([(15, 1, True)], 1))
    assert microseconds(cost, work_of([(15, 1, True)], 1)) == pytest.approx(
        plain + 2 * (50 + 2 * (3 + 1))
    )


def test_replicas_share_experts(tmp_path: Path) -> None:
    """Nine tokens of each of three engines: all twelve experts, four of them on this device."""
    cost = read_profile(written(tmp_path, moe=MOE) + ",experts=12,active=12,replicas=3")
    plain = read_profile(written(tmp_path))
    work = work_of([(15, 1, True)] * 3, 3)
    assert microseconds(cost, work) == pytest.approx(microseconds(plain, work) + 2 * 100)


def test_lookups_outside_of_a_table(tmp_path: Path) -> None:
    """A curve continues in proportion; a grid ends, and counts it."""
    assert Curve({2: 4.0, 4: 6.0}).at(8) == 12
    assert Curve({2: 4.0, 4: 6.0}).at(1) == 4
    grid = Grid({(0,): 1.0, (4,): 5.0})
    assert (grid.at((1,)), grid.at((9,)), grid.num_outside) == (2, 5, 1)
    holes = Grid({(0, 0): 1.0, (4, 4): 5.0})
    assert (holes.at((1, 1)), holes.num_outside) == (pytest.approx(1.4), 0)
    assert (holes.at((0, 4)), holes.num_outside) == (1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dense": "layer,tokens,time_ms\nembedding,1,10\n"},
            "line 1 must be layer,tokens,time_us",
        ),
        ({"attention": "prefill_chunk,n_decode,time_us\n1,1,1\n"}, "line 1 must be prefill_chunk"),
        ({"dense": DENSE + "down_proj,101,220\n"}, "line 8 repeats the numbers of an earlier line"),
        ({"per_sequence": PER_SEQUENCE + "lm_head,12,nan\n"}, "line 4 must end with microseconds"),
        ({"per_sequence": PER_SEQUENCE + "lm_head,12,-1\n"}, "line 4 must end with microseconds"),
        ({"per_sequence": PER_SEQUENCE + "lm_head,1.5,1\n"}, "line 4 must have whole numbers"),
        ({"per_sequence": PER_SEQUENCE + "lm_head,1\n"}, "line 4 must have 3 values, got 2"),
        ({"dense": ""}, "line 1 must be a heading line"),
        ({"dense": DENSE + "down_proj,9,1\n" * measured.MOST_LINES}, "line 200001 and longer"),
    ],
)
def test_wrong_tables_are_named_by_line(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(written(tmp_path, **change))
    assert caught.value.param == "cost"
    assert f"toy_{next(iter(change))}.csv" in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b\x08" + bytes(7) + b"damaged", b'layer,"tokens\n1', b"\xff\n\xff", b"\n\n"],
)
def test_damaged_tables_are_named(tmp_path: Path, content: bytes) -> None:
    cost = written(tmp_path)
    (tmp_path / "toy_dense.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=r"toy_dense\.csv") as caught:
        read_profile(cost)
    assert caught.value.param == "cost"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (",layers=0", "layers, devices and replicas must be at least 1"),
        (",layer=3", "got 'layer=3'"),
        (",host=soon", "got 'host=soon'"),
        (",host=nan", "host must be at least 0"),
        (",devices=2", "devices needs width and bandwidth"),
        (",experts=4", "active must be from 1 to experts"),
        (",experts=4,active=2", "toy_moe.csv cannot be read"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(written(tmp_path) + flags)
    assert caught.value.param == "cost"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compressed tables are read, and the result says how often it left them."""
    cost = written(tmp_path)
    for path in tmp_path.glob("*.csv"):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    flags = ["--num-requests", "3", "--jobs", "1", "--cost", cost]
    assert main(["chunked", *flags]) == 0
    assert '"lookups_outside": ' in capsys.readouterr().out


def test_a_recorded_run_is_repeated(tmp_path: Path) -> None:
    """Two requests of a recording that the tables explain exactly, and a limit that fails."""
    written(tmp_path)
    lines = (
        '{"input_toks": 16, "output_toks": 2, "queued_ts": 5.0, "first_token_ts": 5.001, "last_token_ts": 5.003}\n'
        * 2
    )
    (tmp_path / "toy_requests.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    theirs = "".join(
        f"{title} {name}  1.0  1.0  +0.5%\n"
        for title in command.TITLES.values()
        for name in command.SUMMARIES.values()
    )
    (tmp_path / "toy_their_errors.txt.gz").write_bytes(gzip.compress(theirs.encode()))
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "overlap": False}
    model = {**QWEN3_32B, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    files = ("toy_requests.jsonl.gz", "toy,layers=2")
    run = GpuRun("toy", model, "rtx4090x1", *files, settings, Limits(9, 0, 9), "-")
    result = command.repeated(run, tmp_path)
    assert result.measured["latency", "mean"] == pytest.approx(0.003)
    assert result.is_within("first_token") and not result.is_within("per_token")
    assert result.theirs["TTFT Mean"] == pytest.approx(0.005)
    plan = plans.planned(run, tmp_path)
    assert plan.load == (2, 17, 16)  # an answer of two tokens has one more on average
    assert plan.recorded == pytest.approx(0.002)
    cost = read_profile(f"profile:{tmp_path}/toy,layers=2")
    work = work_of([(16, 1, True)] * 2 + [(0, 16, False)], 2)._replace(members=3)
    assert plan.planned == pytest.approx(sum(cost.stages(work, 1)))
    assert f"{plan.error:+.1%} FAIL | 15%" in plans.plans_text([plan])
