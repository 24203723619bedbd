"""Who judges what: every judge, the server it wants, and one run of it through the recorder."""

import collections
import dataclasses
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import HERE, node_modules, python_environment
from recorder import Exchange, Recorder
from serving import serving
from tests.openai.shapes import check_response

ROOT = HERE.parents[1]
FOLDER = ROOT / ".judges"

__all__ = ["JUDGES", "Judge", "Outcome", "judge"]


@dataclasses.dataclass(frozen=True)
class Judge:
    """One judge: its program, its environment, and the server that it is let loose on."""

    program: str
    environment: str
    model: str = "preset:toy"
    flags: Sequence[str] = ()
    python: str = "3.12"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The toy has no chat template of its own.
TALKS = ("--chat-template", str(HERE / "chat_template.jinja"), "--tool-call-parser", "hermes")
FEW_ROWS = (*TALKS, "--max-num-seqs", "4")  # which a check fills
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(FOLDER / "hugging-face"), "TOKENIZERS_PARALLELISM": "false"}
LLAMA = FOLDER / "models" / "llama"
JUDGES: Mapping[str, Judge] = {
    "openai-python-2": Judge("judge_openai.py", "openai2", flags=FEW_ROWS),
    "openai-python-3": Judge("judge_openai.py", "openai3", flags=FEW_ROWS),
    "openai-node": Judge("judge_node.mjs", "node", flags=TALKS),
    "litellm": Judge("judge_litellm.py", "litellm", flags=TALKS, variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    "langchain-openai": Judge("judge_langchain.py", "langchain", flags=TALKS),
    "instructor": Judge("judge_instructor.py", "instructor", model="demo"),
    # Cases that set no limit generate until the context is full: a short one keeps them quick.
    "schemathesis": Judge("judge_schemathesis.py", "schemathesis", flags=(*TALKS, "--max-model-len", "256")),
    "lm-eval": Judge(
        "judge_lm_eval.py",
        "lm-eval",
        model=str(LLAMA),
        flags=("--dtype", "float32"),
        python="3.11",
        variables=NO_NETWORK,
    ),
}


@dataclasses.dataclass
class Outcome:
    """What a judge found. `checks` are rows of name, seconds and error; `cases` were made by the judge itself."""

    versions: dict[str, str]
    checks: list[dict[str, Any]]
    cases: int = 0
    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # of all answers
    violations: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Rows with an error."""
        return [row for row in self.checks if row["error"] is not None]

    @property
    def is_green(self) -> bool:
        """Whether nothing at all was found."""
        return bool(self.checks) and not (self.failed or self.violations or self.faults)


def judge(name: str) -> Outcome:
    """Make the environment, start the server, run the judge through the recorder. Raises SystemExit."""
    judge_ = JUDGES[name]
    if judge_.environment == "node":
        modules = node_modules(FOLDER, judge_.environment)
        command = ["node", str(HERE / judge_.program), "--modules", str(modules)]
    else:
        python = python_environment(FOLDER, judge_.environment, judge_.python)
        command = [str(python), str(HERE / judge_.program)]
    if judge_.model == str(LLAMA) and not (LLAMA / "contexts.json").exists():
        LLAMA.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "--make", str(LLAMA)], check=True, env={**os.environ, **judge_.variables})
    key = f"sk-{secrets.token_hex(16)}"
    with serving(ROOT, ["--model", judge_.model, *judge_.flags], key) as server:
        with Recorder(server.port, hold_to_shapes).running() as recorder:
            outcome = run(command, judge_, f"http://127.0.0.1:{recorder.port}", key)
        outcome.statuses, outcome.violations = recorder.statuses, recorder.violations
    outcome.faults += server.faults
    return outcome


def hold_to_shapes(exchange: Exchange) -> None:
    """The recorder's check. Raises AssertionError."""
    check_response(
        exchange.method,
        exchange.target,
        bytes(exchange.request_body),
        exchange.status,
        exchange.headers,
        bytes(exchange.body),
        complete=exchange.complete,
    )


def run(command: Sequence[str], judge_: Judge, url: str, key: str) -> Outcome:
    """Run the judge's program and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = ["--url", url, "--model", judge_.model, "--api-key", key, "--report", str(report)]
        # Some clients take the key from here alone.
        variables = {**os.environ, "OPENAI_API_KEY": key, **judge_.variables}
        done = subprocess.run([*command, *flags], cwd=folder, env=variables)
        if not report.exists():
            return Outcome({}, [], faults=[f"{judge_.program} ended with {done.returncode} and without a report"])
        return Outcome(**json.loads(report.read_text(encoding="utf-8")))
