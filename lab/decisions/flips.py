"""Flips and calibration errors of choices on public labelled texts, with and without averaging and calibration.

Each text has one question, with its options in the order given and in two other ones. A *flip* is another answer in
another order: the share of texts, mean of both orders. The calibration is that of `orca-jax calibrate`, fitted to one
half of the texts in the order given, and used for the other half; the measures are those of both halves together.
"""

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.decisions.calls import scores_of
from lab.decisions.labelled import LabelledSet, labelled_sets
from lab.decisions.record import add_save, finish
from lab.pages.markdown import table
from orca_jax import LLM, Question
from orca_jax.flags import add_number
from orca_jax.helpers.bundled import model_directory
from orca_jax.text.decisions.reads import FitsByKind, OptionOrder, Readout, TypedAnswer
from orca_jax.tools.calibrate.fit import LabelledAnswers, fit, measure
from orca_jax.values.request import TokenLogprobs

NUM_ORDERS = 3  # of options: the one given, and two others
ORDERS: Sequence[OptionOrder] = ("given", "averaged")
FOLDER = Path.home() / ".cache" / "orca-jax" / "decisions"
_HEAD = ("set", "options", "read", "accuracy", "ECE", "flips")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="the model that decides"
    )
    parser.add_argument("--name", metavar="NAME", help="name in the record (default: the model)")
    parser.add_argument("--dtype", default="bfloat16", help="numbers of the model")
    parser.add_argument(
        "--data", type=Path, default=FOLDER, metavar="DIR", help="place of the downloaded package"
    )
    add_number(parser, "--rows", 240, "texts of each set")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both sets, and print a table."""
    sets = labelled_sets(args.data, args.rows)
    path = model_directory(args.model)
    with LLM(path, dtype=args.dtype, max_num_seqs=32, max_model_len=512) as llm:
        result = {each.name: measured(llm, each) for each in sets}
    print(table(_HEAD, rows_of(result)), end="")
    finish(args, "flips", args.name or args.model, {"dtype": args.dtype, "sets": result})
    return 0


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    found = []
    for name, one in result.items():
        for kind, figures in one["by_kind"].items():
            numbers = [f"{figures[key]:.3f}" for key in ("accuracy", "ece", "flips")]
            found.append([f"{name}, {one['rows']}", f"{one['options']}", kind, *numbers])
    return found


def measured(llm: LLM, labelled: LabelledSet) -> dict[str, Any]:
    """The figures of one set by the kind of reading."""
    draw = random.Random(1)
    places = list(range(len(labelled.options)))
    orders = [tuple(places)]
    while len(orders) < min(NUM_ORDERS, math.factorial(len(places))):
        draw.shuffle(places)
        if tuple(places) not in orders:
            orders.append(tuple(places))
    asked = []
    for turn in orders:
        options = [labelled.options[place] for place in turn]
        asked.append(Question.choice(labelled.question, options))
    by_kind: dict[str, dict[str, float]] = {}
    for order in ORDERS:
        calls = [
            llm._decision_texts.reading(row.text, asked, order, 1.0, None, None)
            for row in labelled.rows
        ]
        scores = scores_of(llm, calls)
        plain = [call.decisions(found) for call, found in zip(calls, scores, strict=True)]
        if order == "given":
            fits = halves_fitted(plain, labelled)
        by_kind[order] = figures_of(plain, labelled)
        calibrated = decided(calls, scores, fits)
        by_kind[f"{order}, calibrated"] = figures_of(calibrated, labelled)
    return {"rows": len(labelled.rows), "options": len(labelled.options), "by_kind": by_kind}


def halves_fitted(
    plain: Sequence[Sequence[TypedAnswer]], labelled: LabelledSet
) -> list[FitsByKind]:
    """A fit for the even rows, made of the odd ones, and the reverse."""
    given = np.array([answers[0].probabilities for answers in plain])
    logprobs = np.log(np.maximum(given, 1e-30)).astype(np.float32)
    right = np.array([row.answer for row in labelled.rows], np.int32)
    halves = [LabelledAnswers(logprobs[begin::2], right[begin::2]) for begin in (1, 0)]
    return [{"choice": fit(half)} for half in halves]


def decided(
    calls: Sequence[Readout],
    scores: Sequence[Sequence[TokenLogprobs]],
    fits: Sequence[FitsByKind],
) -> list[list[TypedAnswer]]:
    """The answers with the calibration of the other half."""
    return [
        call.decisions(found, calibration=fits[index % 2])
        for index, (call, found) in enumerate(zip(calls, scores, strict=True))
    ]


def figures_of(answers: Sequence[Sequence[TypedAnswer]], labelled: LabelledSet) -> dict[str, float]:
    """Accuracy and calibration error in the order given, and flips in the other ones."""
    given = np.array([each[0].probabilities for each in answers])
    measures = measure(given, [row.answer for row in labelled.rows])
    flips: list[bool] = []
    for first, *others in answers:
        flips += [first.answer != each.answer for each in others]
    return {"accuracy": measures.accuracy, "ece": measures.ece, "flips": float(np.mean(flips))}
