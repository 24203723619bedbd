"""The policy of docs/own_scheduler.md passes the check, runs in virtual time, and serves a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.cli.main import main
from orca_jax.tools.simulate.check import find_fault
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from tests.docs.pages import blocks

PAGE = "docs/own_scheduler.md"


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "queues.py"
    path.write_text(next(block.text for block in blocks(PAGE) if block.language == "python"))
    assert len(path.read_text().splitlines()) < 150
    return path


def test_it_passes_the_check(queues: Path) -> None:
    assert find_fault(f"{queues}:FeedbackQueues", num_cases=48) == ""
    assert (
        find_fault(f"{queues}:FeedbackQueues", '{"quantum": 1, "patience": 4}', num_cases=24) == ""
    )


def test_short_answers_are_quick(queues: Path) -> None:
    load = [SimulatedRequest(0.02 * n, 16, 200 if n < 4 else 3) for n in range(40)]
    cost, sizes = LinearCost(0.02, 0.0, 0.0), {"max_num_seqs": 4, "max_num_rows": 16}
    long = [
        record.end
        for record in simulate("chunked", load, cost, max_num_seqs=4).records
        if record.output == 3
    ]
    short = [
        record.end
        for record in simulate(f"{queues}:FeedbackQueues", load, cost, **sizes).records
        if record.output == 3
    ]
    assert max(short) < min(long), "four long requests keep out all others"


def test_the_blocks_of_the_page_run(queues: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shell,) = [block.text for block in blocks(PAGE) if block.language == "bash"]
    check, sweep, why, serve = [line.split()[1:] for line in shell.splitlines()]
    os.chdir(queues.parent)
    assert main([*check, "--cases", "2"]) == 0
    assert main([*sweep, "--num-requests", "4", "--jobs", "1"]) == 0
    assert main(why) == 0
    assert "request 17 in iteration 40: it " in capsys.readouterr().out
    assert serve[1:4] == ["demo", "--scheduler", "queues.py:FeedbackQueues"]
    notebook = [block.text for block in blocks(PAGE) if block.language == "python"][1]
    shown = subprocess.run(
        [sys.executable, "-c", notebook], capture_output=True, text=True, timeout=120, check=True
    )
    assert "SimulatedRecord(request=17" in shown.stdout


def test_it_serves_a_model(queues: Path) -> None:
    prompts = [{"prompt_token_ids": list(range(1, 3 + n))} for n in range(6)]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    answers = []
    for settings in ({}, {"scheduler": f"{queues}:FeedbackQueues", "max_num_rows": 6}):
        with LLM(model="preset:toy", max_num_seqs=2, **settings) as llm:
            answers.append(
                [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
            )
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_it_serves_the_demo_model(queues: Path) -> None:
    assert (
        main(["check-policy", f"{queues}:FeedbackQueues", "--cases", "1", "--model", "demo"]) == 0
    )
