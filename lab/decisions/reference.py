"""Compare probabilities and label masses with those of transformers on the same GGUF file, in float32.

Half of the calls have labels of one token, as routes do; the labels of the others are words, most of several tokens.
All calls of a kind run together. The reference computes each prompt alone, in an environment of its own with torch,
transformers, gguf and accelerate.
"""

import argparse
import json
import math
import random
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

from lab.decisions.calls import plain_reads, question, readout, scores_of, state
from lab.decisions.record import ROOT, add_save, finish
from orca_jax import LLM
from orca_jax.flags import add_number
from orca_jax.helpers.bundled import model_directory
from orca_jax.text.decisions.reads import Readout, TypedAnswer, softmax
from orca_jax.values.errors import OrcaError

MOST_APART = 1e-5
_CHILD = ROOT / "lab" / "peers" / "programs" / "label_scores.py"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this comparison."""
    parser.add_argument("--model", default="smollm2", metavar="FILE", help="a GGUF file")
    parser.add_argument("--name", metavar="NAME", help="name in the record (default: the model)")
    parser.add_argument(
        "--python", required=True, metavar="FILE", help="interpreter of the reference"
    )
    add_number(parser, "--calls", 200, "calls for decisions")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, and print the figures. The exit status is 1 if a probability is more than 1e-5 apart."""
    path = Path(model_directory(args.model))
    with LLM(str(path), dtype="float32", max_num_seqs=32, max_model_len=512) as llm:
        calls = make_calls(llm, args.calls)
        scores = scores_of(llm, calls)
    answers = [call.decisions(found) for call, found in zip(calls, scores, strict=True)]
    theirs = by_transformers(args.python, path, calls)
    result = compared(calls, answers, theirs["scores"])
    result["versions"] = theirs["versions"]
    finish(args, "reference", args.name or args.model, result)
    apart = max(result["probabilities"], result["label_mass"])
    return int(apart > MOST_APART)


def make_calls(llm: LLM, number: int) -> list[Readout]:
    """The calls, of two questions each; every other one has words as labels."""
    draw = random.Random(0)
    calls = []
    for index in range(number):
        has_words = index % 2 == 1
        kinds = (3, 3) if has_words else (index // 2, index // 2 + 1)
        questions = [question(draw, kind % 3 if not has_words else kind) for kind in kinds]
        calls.append(readout(llm, state(draw), questions, words=has_words))
    return calls


def by_transformers(python: str, path: Path, calls: list[Readout]) -> dict[str, Any]:
    """The scores of the reference, a list for each question. Raises OrcaError if it ends with an error."""
    reads = chain.from_iterable(map(plain_reads, calls))
    asked = [read._asdict() for read in reads]
    done = subprocess.run(
        [python, str(_CHILD), str(path)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OrcaError(f"the reference ended with {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compared(
    calls: list[Readout], answers: list[list[TypedAnswer]], scores: list[list[float]]
) -> dict[str, Any]:
    """The largest distances of probabilities and of label masses."""
    left = iter(scores)
    apart = {"probabilities": 0.0, "label_mass": 0.0}
    num_several = 0
    for call, ours in zip(calls, answers, strict=True):
        for labels, one in zip(call.labels, ours, strict=True):
            theirs = next(left)
            pairs = zip(one.probabilities, softmax(theirs), strict=True)
            mass = math.fsum(map(math.exp, theirs))
            far = max([abs(our - their) for our, their in pairs])
            apart["probabilities"] = max(apart["probabilities"], far)
            apart["label_mass"] = max(apart["label_mass"], abs(one.label_mass - mass))
            num_several += not labels.are_single
    return {"calls": len(calls), "questions": len(scores), "several_tokens": num_several, **apart}
