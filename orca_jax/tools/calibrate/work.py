"""The work of `orca-jax calibrate`: read labelled rows, decide them, and write a calibration."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orca_jax.llm import LLM
from orca_jax.text.decisions.calibration import VERSION
from orca_jax.text.decisions.questions import Question, QuestionKind
from orca_jax.text.decisions.reads import Fitted, TypedAnswer
from orca_jax.tools.calibrate.fit import (
    ABSENT,
    LabelledAnswers,
    Measures,
    cross_validated,
    fit,
    measure,
    probabilities,
)
from orca_jax.values.checks import check_new_file
from orca_jax.values.errors import ConfigError, RequestError, reason_of

LEAST_ROWS = 10  # of a kind
MAX_ROWS = 1_000_000
_COLUMNS = ("kind", "rows", "ECE", "Brier", "NLL", "accuracy", "temperature")


class LabelledRow(NamedTuple):
    """A state, a question, and the index of its answer."""

    state: Any
    question: Question
    answer: int


def calibrate(args: argparse.Namespace) -> None:
    """Write a calibration, and print its measures. Raises ConfigError: a flag, a file or a row is wrong."""
    check_new_file(args.output, "output")
    rows = list(_rows(Path(args.input)))
    settings: dict[str, Any] = {}
    if args.max_model_len is not None:
        settings["max_model_len"] = args.max_model_len
    with LLM(args.model, **settings) as llm:
        answers = [_answer(llm, row) for row in rows]
    by_kind: defaultdict[QuestionKind, list[tuple[LabelledRow, TypedAnswer]]] = defaultdict(list)
    for row, answer in zip(rows, answers, strict=True):
        by_kind[row.question.kind].append((row, answer))
    kinds = {
        kind: _calibrated(pairs, args)
        for kind, pairs in by_kind.items()
        if len(pairs) >= LEAST_ROWS
    }
    if not kinds:
        raise ConfigError(f"no kind of question has {LEAST_ROWS} rows; add rows", param="input")
    whole = {"version": VERSION, "model": args.model, "kinds": kinds}
    Path(args.output).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    _print(kinds)


def _rows(path: Path) -> Iterator[LabelledRow]:
    """The rows of a file. Raises ConfigError; the message names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        message = f"{path} cannot be read: {reason_of(error)}"
        raise ConfigError(message, param="input") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}", param="input") from None
    if len(lines) > MAX_ROWS:
        raise ConfigError(f"{path} has more than {MAX_ROWS} rows; use fewer", param="input")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _row(json.loads(line))
        except (KeyError, TypeError, ValueError, RequestError) as error:
            what = (
                f"{path}:{number} is not a labelled row: {error!r}; see orca-jax calibrate --help"
            )
            raise ConfigError(what, param="input") from None


def _row(values: Mapping[str, Any]) -> LabelledRow:
    """A row of a line. Raises KeyError, TypeError, ValueError and RequestError."""
    kind = values["type"]
    text = str(values["question"])
    answer = values["answer"]
    if kind == "yes_no":
        if answer not in (True, False, "yes", "no"):
            raise ValueError("the answer must be true, false, yes or no")
        return LabelledRow(values["state"], Question.yes_no(text), int(answer in (True, "yes")))
    if kind == "choice":
        question = Question.choice(text, values["options"])
    elif kind == "score":
        question = Question.score(text, values["levels"])
    else:
        raise ValueError("the type must be yes_no, choice or score")
    names = [option.name for option in question.options]
    index = answer if type(answer) is int else names.index(answer)
    if not 0 <= index < len(names):
        raise ValueError("the answer is not one of the options")
    return LabelledRow(values["state"], question, index)


def _answer(llm: LLM, row: LabelledRow) -> TypedAnswer:
    (answer,) = llm.decide(row.state, [row.question])
    return answer


def _calibrated(
    pairs: Sequence[tuple[LabelledRow, TypedAnswer]], args: argparse.Namespace
) -> dict[str, Any]:
    """The fit of one kind with its measures."""
    width = max([len(row.question.options) for row, _ in pairs])
    logprobs = np.full((len(pairs), width), ABSENT, np.float32)
    for place, (_, answer) in enumerate(pairs):
        # up to a number for each row, which no fit depends on
        logprobs[place, : len(answer.probabilities)] = np.log(
            np.maximum(answer.probabilities, 1e-30)
        )
    rows = LabelledAnswers(logprobs, np.array([row.answer for row, _ in pairs], np.int32))
    folds = max(2, min(args.folds, len(pairs)))
    before = measure(probabilities(logprobs, Fitted()), rows.answers)
    after = measure(cross_validated(rows, folds, args.seed), rows.answers)
    fitted = fit(rows)
    return {
        "temperature": round(fitted.temperature, 6),
        "bias": list(fitted.bias),
        "rows": len(pairs),
        "before": before._asdict(),
        "after": after._asdict(),
    }


def _print(kinds: Mapping[QuestionKind, Mapping[str, Any]]) -> None:
    """Print the measures before and after, one line for each."""
    print("  ".join(f"{name:>11}" for name in _COLUMNS))
    for kind, found in kinds.items():
        for name in ("before", "after"):
            one = Measures(**found[name])
            numbers = [f"{each:11.4f}" for each in (one.ece, one.brier, one.nll, one.accuracy)]
            temperature = found["temperature"] if name == "after" else 1.0
            head = [f"{kind:>11}", f"{found['rows']:11}"]
            print("  ".join([*head, *numbers, f"{temperature:11.4f}", name]))
