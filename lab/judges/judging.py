"""The third-party clients, the server of each, and one run of a client through the recorder."""

import collections
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.judges.agent_table import AGENTS
from lab.judges.environments import HERE, node_modules, python_environment
from lab.judges.recorder import Exchange, Recorder
from lab.judges.serving import serving
from tests.agents.checkpoint import TEMPLATE, TEMPLATE_WITHOUT_TOOLS, Call, write_checkpoint
from tests.openai.shapes import check_response

ROOT = HERE.parents[1]
CLIENTS = HERE / "clients"
FOLDER = ROOT / ".judges"

__all__ = ["JUDGES", "Judge", "Outcome", "judge"]


@dataclasses.dataclass(frozen=True)
class Judge:
    """One third-party client: its program, its environment, and its server. `served` is another name of the model."""

    program: str
    environment: str
    model: str = "preset:toy"
    served: str = ""
    flags: Sequence[str] = ()
    python: str = "3.12"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The toy has no chat template of its own.
TALKS = ("--chat-template", str(HERE / "chat_template.jinja"), "--tool-call-parser", "hermes")
FEW_ROWS = (*TALKS, "--max-num-seqs", "4")  # one check fills all rows
NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(FOLDER / "hugging-face"),
    "TOKENIZERS_PARALLELISM": "false",
}
LLAMA = FOLDER / "models" / "llama"
CODERS = FOLDER / "models" / "coders"
PAGES = {"open-webui": TEMPLATE, "open-webui-without-tools": TEMPLATE_WITHOUT_TOOLS}
JUDGES: Mapping[str, Judge] = {
    "openai-python-2": Judge("judge_openai.py", "openai2", flags=FEW_ROWS),
    "openai-python-3": Judge("judge_openai.py", "openai3", flags=FEW_ROWS),
    "openai-node": Judge("judge_node.mjs", "node", flags=TALKS),
    "litellm": Judge(
        "judge_litellm.py",
        "litellm",
        flags=TALKS,
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "langchain-openai": Judge("judge_langchain.py", "langchain", flags=TALKS),
    "langgraph": Judge("judge_langgraph.py", "langchain", flags=TALKS),
    "openai-agents": Judge("judge_agents_sdk.py", "agents-sdk", flags=TALKS),
    "pydantic-ai": Judge("judge_pydantic_ai.py", "pydantic-ai", flags=TALKS),
    "llama-index": Judge("judge_llama_index.py", "llama-index", flags=TALKS),
    "ai-sdk-6": Judge("judge_ai_sdk.mjs", "ai6", flags=TALKS),
    "ai-sdk-7": Judge("judge_ai_sdk.mjs", "ai7", flags=TALKS),
    "anthropic": Judge("judge_anthropic.py", "anthropic", flags=TALKS),
    "open-responses": Judge("judge_open_responses.py", "open-responses", flags=TALKS),
    # A choice among 255 options takes 9,000 bytes.
    "decisions": Judge(
        "decisions/judge_decisions.py", "decisions", flags=(*TALKS, "--max-model-len", "16384")
    ),
    "decision-libraries": Judge(
        "decisions/judge_libraries.py",
        "decision-libraries",
        flags=TALKS,
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "decision-packages": Judge("decisions/judge_packages.mjs", "decisions", flags=TALKS),
    "instructor": Judge("judge_instructor.py", "instructor", model="demo"),
    # Cases without a limit generate until the context is full: a short context keeps them quick.
    "schemathesis": Judge(
        "judge_schemathesis.py", "schemathesis", flags=(*TALKS, "--max-model-len", "256")
    ),
    "lm-eval": Judge(
        "judge_lm_eval.py",
        "lm-eval",
        model=str(LLAMA),
        flags=("--dtype", "float32"),
        python="3.11",
        variables=NO_NETWORK,
    ),
    # A page in a browser; in the second case its model has a chat template without tools.
    **{
        name: Judge(
            "judge_open_webui.py",
            "open-webui",
            str(CODERS / name),
            "coder",
            ("--max-num-seqs", "8"),
            "3.11",
        )
        for name in PAGES
    },
    **{
        name: Judge(
            "judge_agent.py",
            "agents",
            str(CODERS / name),
            served="coder",
            flags=("--max-num-seqs", "8"),
        )
        for name in AGENTS
    },
}


@dataclasses.dataclass
class Outcome:
    """The results of one client. `checks` are rows of name, seconds and error; `cases` are the client's own cases."""

    versions: dict[str, str]
    checks: list[dict[str, Any]]
    cases: int = 0
    # of all responses
    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    violations: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The rows with an error."""
        return [row for row in self.checks if row["error"] is not None]

    @property
    def is_green(self) -> bool:
        """True if checks ran, without an error, a violation or a fault."""
        return bool(self.checks) and not (self.failed or self.violations or self.faults)


def judge(name: str) -> Outcome:
    """Create the environment, start the server, and run the client through the recorder. Raises SystemExit."""
    judge_ = JUDGES[name]
    if judge_.program.endswith(".mjs"):
        modules = node_modules(FOLDER, judge_.environment, HERE / "packages" / judge_.environment)
        command = ["node", str(CLIENTS / judge_.program), "--modules", str(modules)]
    elif name in AGENTS:
        modules = node_modules(FOLDER, judge_.environment, HERE / "packages" / judge_.environment)
        command = [
            sys.executable,
            str(CLIENTS / judge_.program),
            "--modules",
            str(modules),
            "--agent",
            name,
        ]
        write_checkpoint(CODERS / name, AGENTS[name].call)
    elif name in PAGES:
        python = python_environment(FOLDER, judge_.environment, judge_.python, is_complete=True)
        shown = ["--without-tools"] if PAGES[name] == TEMPLATE_WITHOUT_TOOLS else []
        command = [str(python), str(CLIENTS / judge_.program), *shown]
        write_checkpoint(CODERS / name, Call("get_current_timestamp"), PAGES[name])
    else:
        python = python_environment(FOLDER, judge_.environment, judge_.python)
        command = [str(python), str(CLIENTS / judge_.program)]
    if judge_.model == str(LLAMA) and not (LLAMA / "contexts.json").exists():
        LLAMA.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "--make", str(LLAMA)], check=True, env=environment(judge_))
    key = f"sk-{secrets.token_hex(16)}"
    names = ["--served-model-name", judge_.served] if judge_.served else []
    with serving(ROOT, ["--model", judge_.model, *names, *judge_.flags], key) as server:
        with Recorder(server.port, hold_to_shapes).running() as recorder:
            outcome = run(command, judge_, f"http://127.0.0.1:{recorder.port}", key)
        outcome.statuses = recorder.statuses
        outcome.violations = recorder.violations
    outcome.faults += server.faults
    return outcome


def hold_to_shapes(exchange: Exchange) -> None:
    """Check a response against OpenAI's shapes, for the recorder. Raises AssertionError."""
    check_response(
        exchange.method,
        exchange.target,
        bytes(exchange.request_body),
        exchange.status,
        exchange.headers,
        bytes(exchange.body),
        complete=exchange.complete,
    )


def environment(judge_: Judge) -> dict[str, str]:
    """The variables of a client's process: its program imports modules of the project."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **judge_.variables}


def run(command: Sequence[str], judge_: Judge, url: str, key: str) -> Outcome:
    """Run the client's program and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = [
            "--url",
            url,
            "--model",
            judge_.served or judge_.model,
            "--api-key",
            key,
            "--report",
            str(report),
        ]
        # Some clients read the key only from the environment.
        variables = {"OPENAI_API_KEY": key, **environment(judge_)}
        done = subprocess.run([*command, *flags], cwd=folder, env=variables)
        if not report.exists():
            return Outcome(
                {},
                [],
                faults=[f"{judge_.program} ended with {done.returncode} and without a report"],
            )
        return Outcome(**json.loads(report.read_text(encoding="utf-8")))
