"""Run jevbench and sys1bench against a server with a real model, and record their figures.

Both benchmarks run in an environment of their own, unmodified, by `POST /v1/systemone`. jevbench runs a bundled suite,
and sys1bench all of its suites: generated items with permuted options (A), and with fewer items numbers of options and
lengths of states (C), disturbed states (D), co-asked questions (E), levels (F), negations (G) and costs (I).
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
_TARGETS = ("queue", "priority")  # questions that others are asked beside
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
    add_number(parser, "--items", 20, "of each generator in suite A of sys1bench")
    add_number(parser, "--few", 4, "items of each generator in its other suites")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Run both, and print their figures. The exit status is 1 if the batch changed a probability."""
    python = python_environment(ROOT / ".judges", "decision-benches", "3.12")
    key = f"sk-{secrets.token_hex(16)}"
    flags = ["--model", model_directory(args.model), "--served-model-name", NAME]
    flags += ["--dtype", args.dtype, "--max-model-len", "8192", "--max-num-seqs", "32"]
    with tempfile.TemporaryDirectory() as folder, serving(ROOT, flags, key) as server:
        url = f"http://127.0.0.1:{server.port}"
        benches = Benches(python.parent, Path(folder), url, key)
        result = {
            "jevbench": benches.jevbench(args.suite),
            "sys1bench": benches.sys1bench(args.items, args.few),
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

    def sys1bench(self, items: int, few: int) -> dict[str, Any]:
        """The figures of all suites: see `sys1_figures`."""
        settings = _SETTINGS.format(name=NAME, url=self._url, key=self._key)
        (self._folder / "settings.yaml").write_text(settings, encoding="utf-8")
        adapter = ["--adapter", "jev_typesafe", "--model", NAME, "--config", "settings.yaml"]
        for suites, number in (("A", items), ("CDEFGI", few)):
            words = ["suite", suites, "found", *adapter, "--n", str(number), "--concurrency", "4"]
            self._run("sys1bench", words)
        files = sorted(str(each) for each in (self._folder / "found").glob("preds_*.jsonl"))
        self._run("sys1bench", ["score", *files, "--out", "scores.json"])
        swept = {each.stem: self._read(str(each)) for each in self._swept()}
        return sys1_figures(self._read("scores.json"), swept)

    def _swept(self) -> list[Path]:
        """The files of all suites but A."""
        return sorted((self._folder / "found_sweeps").glob("*.json"))

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


def sys1_figures(scores: dict[str, Any], swept: dict[str, Any]) -> dict[str, Any]:
    """The figures of sys1bench that the page shows.

    Args:
        scores: of suite A, by question.
        swept: the files of the other suites, by name.
    """
    questions = {
        name.rpartition(" / ")[2]: {
            "accuracy": one["accuracy"],
            "ece": one["calibration"]["ece_width_15"],
        }
        for name, one in scores.items()
    }
    interference = {}
    for target in _TARGETS:
        for kind, by_number in swept[f"interference_{target}"]["by_kind"].items():
            for number, one in by_number.items():
                interference[f"{target}, {kind}, {number}"] = {
                    "divergence": one["mean_jsd_vs_alone"],
                    "flips": one["argmax_flip_rate"],
                }
    return {"questions": questions, "interference": interference, "swept": _swept_figures(swept)}


def _swept_figures(swept: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures of suites C, D, F, G and I, by what is varied."""
    options = {
        number: one["accuracy"]
        for number, one in swept["cardinality_rag"].items()
        if one.get("accuracy") is not None
    }
    lengths = {}
    for number, one in swept["length_tickets"].items():
        # without answers there is no accuracy: the longest states leave no room in the context
        right = [each.get("accuracy") for each in one["by_question"].values()]
        if None not in right:
            lengths[number] = sum(right) / len(right)
    noul = swept["noul_is_angry"]
    negated = [one["complement_mad"] for one in noul["complement"]["negations"]]
    levels = swept["ordinal_probes"]["by_levels"]
    disturbed = {}
    for name, by_question in swept["robustness_tickets"]["perturbations"].items():
        moved = [each["jsd_vs_clean"] for each in by_question.values()]
        disturbed[name] = sum(moved) / len(moved)
    costs = swept["decision_value_tickets"]["is_angry"]
    return {
        "accuracy by options": options,
        "accuracy by tokens": lengths,
        "divergence by disturbance": disturbed,
        "accuracy by levels": {number: one["exact_accuracy"] for number, one in levels.items()},
        "negation, distance from 1": {
            f"wording {index}": apart for index, apart in enumerate(negated, 1)
        },
        "choice and noul, divergence": {"is_angry": noul["choice_vs_noul"]["mean_jsd"]},
        "cost of a decision": {name: costs[name]["mean_cost"] for name in ("argmax", "bayes")},
    }
