"""Measurements of decisions, on the toy and by hand."""

import io
import math
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lab.decisions import labelled
from lab.decisions.benches import sys1_figures
from lab.decisions.calls import plain_reads, question, readout, scores_of, state
from lab.decisions.flips import measured, rows_of
from lab.decisions.labelled import LabelledSet, LabelledText
from lab.decisions.page import block
from lab.decisions.reference import compared, make_calls
from lab.decisions.work import Spent, ratios, state_of
from orca_jax import LLM
from orca_jax.values.errors import OrcaError


def test_equal_scores_are_no_distance_apart_and_others_are() -> None:
    with LLM("preset:toy", max_model_len=2048) as llm:
        calls = make_calls(llm, 4)
        scores = scores_of(llm, calls)
    answers = [call.decisions(found) for call, found in zip(calls, scores, strict=True)]
    theirs = [
        [math.log(each) + math.log(one.label_mass) for each in one.probabilities]
        for call in answers
        for one in call
    ]
    found = compared(calls, answers, theirs)
    assert (found["calls"], found["questions"]) == (4, 8)
    assert found["several_tokens"] >= 4, "words have several bytes"
    assert max(found["probabilities"], found["label_mass"]) < 1e-9
    theirs[1][0] += 0.1  # of letters
    found = compared(calls, answers, theirs)
    assert found["probabilities"] > 1e-6


def test_prompts_and_labels_are_those_of_the_reads() -> None:
    draw = random.Random(3)
    with LLM("preset:toy", max_model_len=2048) as llm:
        call = readout(llm, state(draw), [question(draw, 3)], words=True)
        (one,) = plain_reads(call)
    text = bytes(one.prompt).decode()
    assert text.endswith("Answer with the letter of one option only.\nassistant:")
    assert bytes(one.labels[1]).decode() == "deeply disappointed"


def test_flips_of_the_toy() -> None:
    rows = [LabelledText(f"text {index}", index % 2) for index in range(8)]
    sets = LabelledSet("toys", "Which?", ("a", "b"), rows)
    with LLM("preset:toy", max_model_len=512) as llm:
        found = measured(llm, sets)
    assert [*found["by_kind"]] == ["given", "given, calibrated", "averaged", "averaged, calibrated"]
    for figures in found["by_kind"].values():
        assert 0 <= figures["ece"] <= 1 and 0 <= figures["flips"] <= 1
    assert found["by_kind"]["given"]["flips"] == 1, "the toy answers by the letter"
    assert len(rows_of({"toys": found})) == 4


def archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def test_labelled_texts_are_read_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(
        f"{n}\t{rating}\ta &amp; {n}\n" for n, rating in enumerate((-2.0, 0.1, 3.0) * 9)
    )
    inner = {
        f"hutto_ICWSM_2014/{stem}_GroundTruth.txt": lines.encode()
        for stem in labelled._SOURCES.values()
    }
    whole = archive({labelled._INNER: archive(inner)})
    monkeypatch.setattr(labelled, "_downloaded", lambda folder: whole)
    tweets, kinds = labelled.labelled_sets(Path(), 12)
    assert [len(each.rows) for each in (tweets, kinds)] == [12, 12]
    assert {int(row.text.split()[-1]) % 3 for row in tweets.rows if row.answer == 2} == {2}
    assert all(row.text.startswith("a & ") for row in kinds.rows)


def test_another_file_of_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / labelled._FILE).write_bytes(b"other")
    with pytest.raises(OrcaError, match="is not the file"):
        labelled.labelled_sets(tmp_path, 12)


def test_ratios_of_times() -> None:
    found = ratios(
        {
            "decisions": [Spent(2, 1), Spent(4, 3), Spent(3, 2)],
            "prompt": [Spent(3, 2)],
            "chats": [Spent(30, 40)],
        }
    )
    assert (found["of_a_prompt_wall"], found["of_a_prompt_cpu"]) == (1, 1)
    assert (found["of_chats_wall"], found["of_chats_cpu"]) == (0.1, 0.05)
    assert 50 <= len(state_of(50, len)) < 600


def test_figures_of_sys1bench() -> None:
    card = {"accuracy": 0.5, "calibration": {"ece_width_15": 0.1}}
    one: dict[str, Any] = {"mean_jsd_vs_alone": 0.0, "argmax_flip_rate": 0.0}
    beside = {"by_kind": {"relevant": {"2": one}}}
    swept = {
        "interference_queue": beside,
        "interference_priority": beside,
        "cardinality_rag": {"2": {"accuracy": 0.5}, "255": {}},
        "length_tickets": {
            "128": {"by_question": {"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}},
            "8192": {"by_question": {"a": {"n": 0}, "b": {"n": 0}}},
        },
        "noul_is_angry": {
            "complement": {"negations": [{"complement_mad": 0.2}]},
            "choice_vs_noul": {"mean_jsd": 0.1},
        },
        "ordinal_probes": {"by_levels": {"3": {"exact_accuracy": 0.25}}},
        "robustness_tickets": {"perturbations": {"upper": {"a": {"jsd_vs_clean": 0.3}}}},
        "decision_value_tickets": {
            "is_angry": {"argmax": {"mean_cost": 2.0}, "bayes": {"mean_cost": 1.0}}
        },
    }
    found = sys1_figures({"m / queue": card}, swept)
    assert found["questions"] == {"queue": {"accuracy": 0.5, "ece": 0.1}}
    same = {"divergence": 0.0, "flips": 0.0}
    assert found["interference"] == {"queue, relevant, 2": same, "priority, relevant, 2": same}
    assert found["swept"] == {
        "accuracy by options": {"2": 0.5},
        "accuracy by tokens": {"128": 0.75},
        "divergence by disturbance": {"upper": 0.3},
        "accuracy by levels": {"3": 0.25},
        "negation, distance from 1": {"wording 1": 0.2},
        "choice and noul, divergence": {"is_angry": 0.1},
        "cost of a decision": {"argmax": 2.0, "bayes": 1.0},
    }


def test_the_page_shows_what_the_record_has() -> None:
    text = block()
    assert "jevbench-mini | overall 0." in text
    assert "BAT 1.000" in text, "no probability depends on the batch"
    assert "divergence at most 0.0000, flips 0.000" in text
