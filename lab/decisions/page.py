"""The measurements of decisions as tables in Markdown, a block of `lab/pages/command.py`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from lab.decisions.flips import rows_of
from lab.decisions.record import MEASURED
from lab.pages.markdown import table

type Models = Mapping[str, Mapping[str, Any]]


def block() -> str:
    """All tables of the record, each with its command."""
    return tables(json.loads(MEASURED.read_text(encoding="utf-8")))


def tables(record: Mapping[str, Models]) -> str:
    """The tables of a record."""
    return "".join(
        [make(record[section]) for section, make in _TABLES.items() if section in record]
    )


def _reference(models: Models) -> str:
    head = (
        "model",
        "calls",
        "questions",
        "labels of several tokens",
        "probabilities",
        "label mass",
    )
    rows = []
    for name, one in models.items():
        counts = [f"{one[key]}" for key in ("calls", "questions", "several_tokens")]
        apart = [f"{one[key]:.1e}" for key in ("probabilities", "label_mass")]
        rows.append([name, *counts, *apart])
    return _with(
        "Largest distance to transformers in float32", "reference", table(head, rows), models
    )


def _work(models: Models) -> str:
    head = ("model", "tokens", "call, s", "one prompt, s", "chats, s", "of a prompt", "of chats")
    rows = []
    for name, one in models.items():
        seconds = [f"{each['cpu']:.1f} ({each['wall']:.1f})" for each in one["seconds"].values()]
        shares = [
            f"{one[f'{each}_cpu']:.2f} ({one[f'{each}_wall']:.2f})"
            for each in ("of_a_prompt", "of_chats")
        ]
        rows.append([name, f"{one['tokens']}", *seconds, *shares])
    return _with("Processor time, and wall time", "work", table(head, rows), models)


def _beside(models: Models) -> str:
    head = (
        *("model", "questions", "tokens"),
        *("orca-jax, s", "vLLM, s", "vLLM / orca-jax"),
        *("change in company, orca-jax", "vLLM", "from the cache, orca-jax", "vLLM"),
    )
    rows = []
    for name, one in models.items():
        seconds = [f"{each['cpu']:.1f} ({each['wall']:.1f})" for each in one["seconds"].values()]
        ratio = f"{one['ratio']['cpu']:.2f} ({one['ratio']['wall']:.2f})"
        changes = []
        for kind in ("company", "cached"):
            changes += [_change(each[kind], one["questions"]) for each in one["changed"].values()]
        sizes = [f"{one[key]}" for key in ("questions", "tokens")]
        rows.append([name, *sizes, *seconds, ratio, *changes])
    title = "Beside vLLM's `/v1/systemone`: processor time, and wall time; largest change of a probability"
    return _with(title, "beside", table(head, rows), models)


def _change(found: Mapping[str, Any], questions: int) -> str:
    """The largest change of a probability, and how many questions have one."""
    if not found["questions"]:
        return "none"
    return f"{found['largest']:.1e}, {found['questions']} of {questions}"


def _flips(models: Models) -> str:
    head = ("model", "set, rows", "options", "read", "accuracy", "ECE", "flips")
    rows: list[list[str]] = []
    for name, one in models.items():
        rows += [[name, *row] for row in rows_of(one["sets"])]
    return _with("Public texts", "flips", table(head, rows), models)


def _benches(models: Models) -> str:
    head = ("model", "benchmark", "figures")
    rows = []
    for name, one in models.items():
        coherence = one["jevbench"]
        pillars = [f"{key} {value:.3f}" for key, value in coherence["pillars"].items()]
        overall = f"overall {coherence['overall']:.3f}"
        rows.append([name, coherence["suite"], ", ".join([overall, *pillars])])
        found = one["sys1bench"]
        for question, figures in found["questions"].items():
            text = f"accuracy {figures['accuracy']:.3f}, ECE {figures['ece']:.3f}"
            rows.append([name, f"sys1bench, {question}", text])
        changed = max([each["divergence"] for each in found["interference"].values()])
        flips = max([each["flips"] for each in found["interference"].values()])
        text = f"divergence at most {changed:.4f}, flips {flips:.3f}"
        rows.append([name, "sys1bench, beside other questions", text])
        for what, figures in found["swept"].items():
            text = ", ".join([f"{each} {value:.3f}" for each, value in figures.items()])
            rows.append([name, f"sys1bench, {what}", text])
    return _with("Benchmarks of others", "benches", table(head, rows), models)


_TABLES: Mapping[str, Callable[[Models], str]] = {
    "reference": _reference,
    "work": _work,
    "beside": _beside,
    "flips": _flips,
    "benches": _benches,
}


def _with(title: str, section: str, found: str, models: Models) -> str:
    """A table below its title, with its command and dates."""
    notes = sorted(
        {f"{one['date']}{one['note'] and f', {one["note"]}'}" for one in models.values()}
    )
    return f"\n{title} (`python -m lab decisions_{section}`; {'; '.join(notes)}):\n\n{found}"
