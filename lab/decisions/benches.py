"""Run jevbench and sys1bench against a server with a real model, and record their figures.

Both benchmarks run in an environment of their own, unmodified, by `POST /v1/systemone`. jevbench runs a bundled suite,
and sys1bench its generated items with permuted options (suite A), and its test of co-asked questions (suite E).
"""

import argparse
import json
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.decisions.record import ROOT, add_save, finish
from lab.judges.environments import python_environment
from lab.judges.serving import serving
from orca_jax.flags import add_number
from orca_jax.helpers.bundled import model_directory
from orca_jax.values.errors import OrcaError

NAME = "decided"  # of the model, for the benchmarks
_OTHER_QUESTIONS = "2,5,10"
_SETTINGS = """\
adapter: jev_typesafe
model_id: {name}
url: {url}/v1/systemone
api_key: {key}
allow_alias: true
probe_models: true
deployment: local
timeout_s: 600
max_retries: 3
"""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="the model that decides"
    )
    parser.add_argument("--name", metavar="NAME", help="name in the record (default: the model)")
    parser.add_argument("--dtype", default="bfloat16", help="numbers of the model")
    parser.add_argument("--suite", default="jevbench-mini", help="of jevbench")
    add_number(parser, "--items", 40, "of each generator of sys1bench")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Run both, and print their figures. The exit status is 1 if the batch changed a probability."""
    python = python_environment(ROOT / ".judges", "decision-benches", "3.12")
    key = f"sk-{secrets.token_hex(16)}"
    flags = ["--model", model_directory(args.model), "--served-model-name", NAME]
    flags += ["--dtype", args.dtype, "--max-model-len", "4096", "--max-num-seqs", "32"]
    with tempfile.TemporaryDirectory() as folder, serving(ROOT, flags, key) as server:
        url = f"http://127.0.0.1:{server.port}"
        benches = Benches(python.parent, Path(folder), url, key)
        result = {
            "jevbench": benches.jevbench(args.suite),
            "sys1bench": benches.sys1bench(args.items),
        }
    finish(args, "benches", args.name or args.model, {"dtype": args.dtype, **result})
    changed = [one["divergence"] for one in result["sys1bench"]["interference"].values()]
    is_same = result["jevbench"]["pillars"]["BAT"] == 1 and not any(changed)
    return int(not is_same)


class Benches:
    """The programs of both benchmarks, with the address and the key of a server."""

    def __init__(self, programs: Path, folder: Path, url: str, key: str) -> None:
        self._programs = programs
        self._folder = folder
        self._url = url
        self._key = key

    def jevbench(self, suite: str) -> dict[str, Any]:
        """The score of each pillar, and of all, from 0 to 1."""
        words = ["eval", "--url", f"{self._url}/v1/systemone", "--model", NAME, "--suite", suite]
        self._run("jevbench", [*words, "--concurrency", "4", "--out", "report.json"])
        scores = self._read("report.json")["scores"]
        return {"suite": suite, "overall": scores["overall"], "pillars": scores["pillars"]}

    def sys1bench(self, items: int) -> dict[str, Any]:
        """Accuracy, calibration error and permutations by question; divergence beside other questions."""
        settings = _SETTINGS.format(name=NAME, url=self._url, key=self._key)
        (self._folder / "settings.yaml").write_text(settings, encoding="utf-8")
        adapter = ["--adapter", "jev_typesafe", "--model", NAME, "--config", "settings.yaml"]
        words = ["suite", "A", "found", *adapter, "--n", str(items), "--concurrency", "4"]
        self._run("sys1bench", words)
        files = sorted(str(each) for each in (self._folder / "found").glob("preds_*.jsonl"))
        self._run("sys1bench", ["score", *files, "--out", "scores.json"])
        manifest = str(self._folder / "found" / "tickets.jsonl")
        words = ["interference", manifest, "beside.json", *adapter, "--qs", _OTHER_QUESTIONS]
        self._run("sys1bench", [*words, "--limit", str(items), "--concurrency", "4"])
        return sys1_figures(self._read("scores.json"), self._read("beside.json"))

    def _run(self, program: str, words: Sequence[str]) -> None:
        done = subprocess.run(
            [str(self._programs / program), *words],
            cwd=self._folder,
            env={"JEVBENCH_API_KEY": self._key, "HOME": str(self._folder), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise OrcaError(f"{program} ended with {done.returncode}: {done.stderr[-1000:]}")

    def _read(self, name: str) -> Any:
        return json.loads((self._folder / name).read_text(encoding="utf-8"))


def sys1_figures(scores: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """The figures of sys1bench that the page shows."""
    questions = {
        name.rpartition(" / ")[2]: {
            "accuracy": one["accuracy"],
            "ece": one["calibration"]["ece_width_15"],
        }
        for name, one in scores.items()
    }
    interference = {}
    for kind, by_number in beside["by_kind"].items():
        for number, one in by_number.items():
            interference[f"{kind}, {number}"] = {
                "divergence": one["mean_jsd_vs_alone"],
                "flips": one["argmax_flip_rate"],
            }
    return {"questions": questions, "interference": interference}
