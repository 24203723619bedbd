"""Whole runs on the toy model: killed, resumed, refused; every line has its row, once."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orca_jax.batch.__main__ import main
from orca_jax.batch.args import parse_args
from orca_jax.batch.output import old_path
from orca_jax.batch.record import record_path
from orca_jax.batch.run import run_batch
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.errors import ConfigError, EngineError
from tests.batch.world import (
    BAD,
    MODEL,
    check_mixed,
    count_lines,
    good_line,
    kill_within,
    kind_of,
    mixed_lines,
    run,
    settings,
    start,
    toy_ids,
    write,
)
from tests.text.hostile import PANICS, write_hostile_tokenizer


@pytest.mark.parametrize(
    ("num_rows", "every", "num_kills"),
    [
        (400, 20, 2),
        pytest.param(10_000, 100, 20, marks=[pytest.mark.slow, pytest.mark.record]),
    ],
)
@pytest.mark.timeout(300)
def test_killed_and_resumed(tmp_path: Path, num_rows: int, every: int, num_kills: int) -> None:
    lines = mixed_lines(num_rows, every)
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    chance = random.Random(num_rows)
    for _ in range(num_kills):
        process = start(source, output, "--max-num-seqs", "1")  # slow enough to be killed in time
        kill_within(process, output, num_rows // (num_kills + 1), chance)
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    written = count_lines(output)
    assert 0 < written < num_rows
    result = run_batch(settings(source, output)).result  # with other means
    assert (result["rows"], result["rows_of_earlier_runs"]) == (num_rows, written)
    assert result["errors"] == dict(Counter(list(BAD) * (num_rows // every // len(BAD))))
    check_mixed(output, lines, every)


def test_interrupted_by_a_signal(tmp_path: Path) -> None:
    lines = [good_line(number, 200) for number in range(1, 41)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(source, output, "--max-num-seqs", "4")
    while not count_lines(output):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        told.endswith(b"interrupted; run the same command again to resume\n")
        and b"Traceback" not in told
    )
    rows = run(source, output)
    assert [row["custom_id"] for row in rows] == [f"row-{number}" for number in range(1, 41)]


def test_in_the_order_of_ends(tmp_path: Path) -> None:
    lines = [good_line(number, 200 if number == 1 else 2) for number in range(1, 200)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    rows = run(source, output, "--order", "finished", "--max-num-seqs", "8")
    ids = [row["custom_id"] for row in rows]
    assert ids.index("row-1") > 10 and sorted(ids) == sorted(
        f"row-{number}" for number in range(1, 200)
    )
    # What a killed process leaves, and then the rest.
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:50]) + whole[50][:30])
    again = run(source, output, "--order", "finished")
    assert again[:50] == rows[:50] and sorted(row["custom_id"] for row in again) == sorted(ids)


def test_prompts_in_objects_and_in_plain_text(tmp_path: Path) -> None:
    body = '{"max_tokens": 3, "temperature": 0, "ignore_eos": true, "return_token_ids": true}'
    rows = run(
        write(tmp_path / "in.txt", [b"One", "Zwölf".encode()]),
        tmp_path / "out.jsonl",
        "--body",
        body,
    )
    assert [row["custom_id"] for row in rows] == ["line-1", "line-2"]
    ids = [row["response"]["body"]["choices"][0]["token_ids"] for row in rows]
    assert ids == [toy_ids("One", 3), toy_ids("Zwölf", 3)]
    objects = [b'{"prompt": "One"}', b'{"prompt": "Two", "custom_id": "two", "max_tokens": 5}\r']
    rows = run(write(tmp_path / "in.jsonl", objects), tmp_path / "out2.jsonl", "--body", body)
    assert [row["custom_id"] for row in rows] == ["line-1", "two"]
    ids = [row["response"]["body"]["choices"][0]["token_ids"] for row in rows]
    assert ids == [toy_ids("One", 3), toy_ids("Two", 5)]


def test_what_only_the_engine_can_refuse_is_a_row(tmp_path: Path) -> None:
    texts = [
        {"prompt": "x", "stream": True},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": ""},
    ]
    lines = [json.dumps(text).encode() for text in texts]
    rows = run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    errors = [row["response"]["body"]["error"] for row in rows]
    assert [row["response"]["status_code"] for row in rows] == [400] * 3
    assert [error["param"] for error in errors] == ["stream", "structured_outputs", "prompt"]
    assert {kind_of(row) for row in rows} == {"400 invalid_request_error"}


def test_ignored_fields_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [b'{"prompt": "x", "max_tokens": 1, "store": true}'] * 2 + [
        b'{"prompt": "x", "max_tokens": 1, "top_z": 1}'
    ]
    rows = run(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert [row["response"]["status_code"] for row in rows] == [200, 200, 400]
    assert [
        record.getMessage() for record in caplog.records if "ignored" in record.getMessage()
    ] == ["line 1: these fields are ignored, here and in later lines: store"]
    rows = run(tmp_path / "in.jsonl", tmp_path / "out2.jsonl", "--unknown-fields", "ignore")
    assert [row["response"]["status_code"] for row in rows] == [
        200
    ] * 3 and "lines: top_z" in caplog.text


def test_a_panic_of_the_tokenizer_is_a_row_and_the_rest_is_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_hostile_tokenizer(tmp_path / "model")
    lines = [
        json.dumps({"prompt": text, "max_tokens": 2}).encode() for text in ("ab", PANICS, "bx")
    ]
    rows = run(
        write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", "--tokenizer", tokenizer
    )
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 200]
    error = rows[1]["response"]["body"]["error"]
    assert (error["param"], "the tokenizer fails" in error["message"]) == ("prompt", True)
    capfd.readouterr()  # the library writes its panics to standard error


def test_done_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in.jsonl", [good_line(1, 2)]), tmp_path / "out.jsonl"
    flags = ["-i", str(source), "-o", str(output), "--model", MODEL, "--no-progress"]
    assert main(flags) == 0
    before = output.read_bytes()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["rows"], result["completion_tokens"], result["errors"]) == (1, 2, {})
    assert result["mean_batch_size"] == 1.0 and result["output_tokens_per_s"] > 0
    # the same settings
    assert main([*flags, "--body", " { } "]) == 0 and output.read_bytes() == before


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input of three lines and an output of two rows; to be copied."""
    folder = tmp_path_factory.mktemp("half")
    source, output = (
        write(folder / "in.jsonl", [good_line(number, 1) for number in (1, 2, 3)]),
        folder / "out.jsonl",
    )
    run(source, output)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    return folder


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ("input", "input", "changed since"),
        ("flag", "body", "was started with"),
        ("record", "output", "out.jsonl.run.json is missing"),
        ("pipe", "output", "out.jsonl.run.json cannot be read: not a regular file"),
        ("version", "output", "another version"),
        ("row", "output", "is not a row"),
        ("order", "output", "does not belong"),
        ("id", "output", "another custom_id"),
    ],
)
def test_another_run_may_not_go_on(
    half_done: Path, tmp_path: Path, change: str, param: str, words: str
) -> None:
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    record = record_path(output)
    first, second = output.read_bytes().splitlines(keepends=True)
    flags: tuple[str, ...] = ()
    match change:
        case "input":
            source.write_bytes(source.read_bytes() + good_line(4, 1))
        case "flag":
            flags = ("--body", '{"max_tokens": 2}')
        case "record":
            record.unlink()
        case "pipe":  # a plain open would wait for a writer
            record.unlink()
            os.mkfifo(record)
        case "version":
            record.write_text(record.read_text().replace('"version": 1', '"version": 0'))
        case "row":
            output.write_bytes(first + b"{}\n")
        case "order":
            output.write_bytes(second + first)
        case "id":
            output.write_bytes(first.replace(b'"row-1"', b'"row-9"') + second)
    before = output.read_bytes()
    with pytest.raises(ConfigError, match=words) as error:
        run(source, output, *flags)
    assert error.value.param == param and "--overwrite" in error.value.message
    assert output.read_bytes() == before


def test_beginning_again(half_done: Path, tmp_path: Path) -> None:
    """The output before stays, with its record: it can be resumed under its new name."""
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True)
    output, before = tmp_path / "out.jsonl", (half_done / "out.jsonl").read_bytes()
    rows = run(tmp_path / "in.jsonl", output, "--overwrite", "--max-model-len", "8")
    assert [row["id"].rpartition("_")[2] for row in rows] == ["1", "2", "3"]
    assert old_path(output).read_bytes() == before
    assert len(run(tmp_path / "in.jsonl", old_path(output))) == 3
    assert old_path(output).read_bytes().startswith(before)


@pytest.mark.parametrize(
    "flags", [("--model", "/no/such"), ("--max-num-batched-tokens", "0"), ("--body", "[]")]
)
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_wrong_setting_changes_no_file(
    half_done: Path, tmp_path: Path, flags: tuple[str, ...], overwrites: bool
) -> None:
    """Neither an output to overwrite nor half a row of a killed process; and a missing output stays missing."""
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True)
    output = tmp_path / "out.jsonl"
    output.write_bytes(output.read_bytes() + b"half a row")
    for place in (output, tmp_path / "another.jsonl"):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        argv = [
            "-i",
            str(tmp_path / "in.jsonl"),
            "-o",
            str(place),
            "--model",
            MODEL,
            "--no-progress",
            *flags,
        ]
        assert main([*argv, *(["--overwrite"] if overwrites else [])]) == 2
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_engine_that_never_answers_leaves_the_output_to_overwrite(
    half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(executor: ToyExecutor, handle: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ToyExecutor, "collect", fail)
    with pytest.raises(EngineError):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--overwrite")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_of_a_run_are_different_files(half_done: Path, tmp_path: Path) -> None:
    shutil.copytree(half_done, tmp_path, dirs_exist_ok=True)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.rename(old_path(output))
    for flags, param in (
        (["-i", str(old_path(output)), "--overwrite"], "overwrite"),
        (["-i", str(old_path(output)), "--trace-file", str(output)], "trace_file"),
        (["-i", str(old_path(output)), "--trace-file", str(old_path(output))], "trace_file"),
        (["-i", str(output)], "output"),
    ):
        with pytest.raises(ConfigError) as error:
            parse_args([*flags, "-o", str(output), "--model", MODEL])
        assert error.value.param == param


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source, output = (
        write(tmp_path / "in.jsonl", [good_line(1, 1), good_line(2, 2000)]),
        tmp_path / "out.jsonl",
    )
    process = start(source, output)
    try:
        while not count_lines(output):
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another process"):
            run(source, output)
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_fails_ends_the_run_and_spoils_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl", [good_line(number, 1 + number) for number in range(1, 100)]
    )
    output, collect = tmp_path / "out.jsonl", ToyExecutor.collect

    def fail(executor: ToyExecutor, handle: Any) -> Any:
        if executor.stats.iterations == 9:
            raise RuntimeError("out of luck")
        return collect(executor, handle)

    with monkeypatch.context() as patch:
        patch.setattr(ToyExecutor, "collect", fail)
        flags = [
            "-i",
            str(source),
            "-o",
            str(output),
            "--model",
            MODEL,
            "--no-progress",
            "--max-num-seqs",
            "4",
        ]
        assert main(flags) == 1
        assert capsys.readouterr().err == "error: the engine failed: out of luck\n"
        assert main([*flags, "--overwrite", "-o", str(tmp_path / "other.jsonl")]) == 1
    assert (
        capsys.readouterr().err
        == "error: the engine failed: out of luck; leave out --overwrite to resume\n"
    )
    assert 0 < count_lines(output) < 99
    assert [kind_of(row) for row in run(source, output)] == [None] * 99
