from pathlib import Path

import pytest

from lab.tpu_blocks import Cost, TuningBatch, candidates, main
from orca_jax.kernels.ragged_attention.tpu.blocks import TABLE, Heads, read_table, rule

HEADS = Heads("TPU v5 lite", num_kv_heads=2, groups=3, head_dim=64, page_size=16, itemsize=2)


def test_cost_of_a_batch() -> None:
    # Two requests of 5 tokens; the last 2 are new, and see 4 and 5 tokens.
    cost = Cost.of(TuningBatch(requests=2, queries=2, context=5), HEADS)
    assert cost.kv_bytes == 2 * 5 * (2 * 2 * 64 * 2)
    assert cost.flops == 2 * (4 + 5) * 4 * 6 * 64


def test_candidates_begin_with_the_rule_and_are_possible() -> None:
    found = list(candidates(HEADS))
    assert found[0] == rule(HEADS)
    assert len(set(found)) == len(found) > 5
    assert all(
        blocks.fetch_pages % n == 0
        for blocks in found
        for n in (blocks.compute_pages, blocks.whole_pages)
    )


def test_tuning_needs_a_tpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-heads", "4"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--num-heads", "5", "--num-kv-heads", "2"], "--num-heads 5 is not a multiple"),
        (["--num-kv-heads", "0"], "--num-kv-heads 0"),
        (["--page-size", "16", "--dtype", "int8"], "multiple of 32, not 16"),
    ],
)
def test_unsupported_heads_are_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*flags, "--dry-run"])
    assert reason in capsys.readouterr().err


def test_the_shipped_table_can_be_read() -> None:
    assert isinstance(read_table(TABLE.read_text(encoding="utf-8")), dict)


@pytest.mark.slow
def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--num-heads",
        "4",
        "--num-kv-heads",
        "2",
        "--head-dim",
        "64",
        "--page-size",
        "32",
        "--dtype",
        "int8",
    ]
    assert main([*flags, "--dry-run", "--out", str(tmp_path / "table.json")]) == 0
    assert "would write" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
