"""500 damaged files of each kind: each loads or is refused by name, and none ends a process or takes long.

The damages are those of `tests/mutations.py`; every twentieth file is cut while it is read.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.model.gguf.test_gguf import write as write_gguf
from tests.model.mutated.child import KINDS
from tests.model.published.directories import FORMS
from tests.model.published.directories import write as write_published
from tests.model.reference import REFERENCE
from tests.model.trees.test_training import CONFIG, ROWS, TinyGPT
from tests.project.source import ROOT

FILES = 500
SECONDS = 60  # for one file, on a busy machine
MODELS = {"safetensors": "llama-12-heads-3-groups", "config": "llama-12-heads-3-groups"}


def whole_files(kind: str, directory: Path) -> Path:
    """A directory that can be read; the file to damage has a copy that ends in `.whole`."""
    directory.mkdir()
    if kind in FORMS:
        published, _ = write_published(directory, "llama", kind)
        shutil.copytree(published, directory, dirs_exist_ok=True)
    elif kind in MODELS:
        shutil.copytree(REFERENCE / MODELS[kind], directory, dirs_exist_ok=True)
    elif kind == "gguf":
        write_gguf(directory / "model.gguf", "qwen3")
    elif kind == "tokenizer":
        shutil.copytree(ROOT / "checkpoints" / "demo", directory, dirs_exist_ok=True)
    else:
        (directory / "config.json").write_text(json.dumps(CONFIG))
        (directory / "mapping.json").write_text(json.dumps({"rows": ROWS, "ignore": []}))
        tree = {"model": nnx.to_pure_dict(nnx.state(TinyGPT(nnx.Rngs(0))))}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory / "params", args=ocp.args.PyTreeSave(tree))
    name = KINDS[kind][0]
    shutil.copy(directory / name, directory / f"{name}.whole")
    return directory


def child_of(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A process, at its end, that has read files; see `child.main`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.model.mutated.child", *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def read_all(
    kind: str, directory: Path, seed: int, number: int
) -> tuple[Counter[str], dict[int, str]]:
    """The outcomes of all files, and the faults by their numbers. A process that ends is a fault; another goes on."""
    counts, faults, first = Counter[str](), dict[int, str](), 0
    while first < number:
        words = (kind, str(directory), str(seed), str(first), str(number), str(SECONDS))
        child = child_of(words)
        begun = first
        for line in map(json.loads, child.stdout.splitlines()):
            if "begun" in line:
                begun = line["begun"]
            elif line["outcome"] in ("loaded", "refused"):
                counts[line["outcome"]] += 1
            else:
                faults[line["number"]] = line["outcome"]
        first = begun + 1
        if child.returncode:
            faults[begun] = f"the process ended with {child.returncode}: {child.stderr[-1500:]}"
    return counts, faults


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_ends_a_process(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, begun = int(os.environ.get("MUTATION_SEED", random.randrange(2**32))), time.monotonic()
    counts, faults = read_all(kind, whole_files(kind, tmp_path / "model"), seed, FILES)
    with capsys.disabled():
        seconds = time.monotonic() - begun
        print(f"\n{kind}: {dict(counts)}, {len(faults)} faults, seed {seed}, {seconds:.0f} s")
    assert not faults, f"seed {seed}: {faults}"
    assert counts.total() == FILES and min(counts["loaded"], counts["refused"]) >= FILES // 50


@pytest.mark.slow
def test_some_damaged_files(tmp_path: Path) -> None:
    """The first files of a fixed seed. One process reads those of all kinds."""
    words = [
        (kind, str(whole_files(kind, tmp_path / kind)), "0", "0", "3", str(SECONDS))
        for kind in KINDS
    ]
    child = child_of(list(chain.from_iterable(words)))
    assert child.returncode == 0, f"{child.stdout[-300:]} {child.stderr[-1500:]}"
    outcomes = [
        line["outcome"] for line in map(json.loads, child.stdout.splitlines()) if "outcome" in line
    ]
    assert len(outcomes) == 3 * len(KINDS) and set(outcomes) <= {"loaded", "refused"}, outcomes
