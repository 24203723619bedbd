"""Probabilities and label masses against the logits of transformers, with labels of one token and of several."""

import math

import numpy as np
import pytest

from orca_jax.text.decisions.labels import AnswerLabels
from orca_jax.text.decisions.questions import Question
from orca_jax.text.decisions.reads import Read, Readout, softmax
from tests.covering import slow
from tests.exec.sampling.test_reference import log_softmax
from tests.test_same_tokens import GPT2, LLAMA, REFERENCE, Job, make_engine, run_updates

pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs")
PLACES = range(2, 30)


@pytest.mark.parametrize(
    ("name", "batch_tokens"), [(GPT2, 16), *(slow(*each) for each in ((LLAMA, 4), ("qwen3", 16)))]
)
def test_decisions_equal_transformers(name: str, batch_tokens: int, program_cache: str) -> None:
    expected = np.load(REFERENCE / name / "expected.npz")
    ids = tuple(expected["ids_3"].tolist())
    logprobs = log_softmax(expected["logits_3"])
    draw = np.random.default_rng(0)
    calls = []
    wanted = []
    for place in PLACES:
        begun = ids[place]
        singles = [int(each) for each in draw.permutation(logprobs.shape[1]) if each != begun]
        del singles[4:]
        labels = AnswerLabels("abcde", [(begun, ids[place + 1]), *((each,) for each in singles)])
        found = [logprobs[place - 1, begun] + logprobs[place, ids[place + 1]]]
        found += [logprobs[place - 1, each] for each in singles]
        question = Question.choice("", [str(each) for each in range(len(labels.ids))])
        for own, scores in ((labels, found), (AnswerLabels("bcde", labels.ids[1:]), found[1:])):
            reads = [
                Read([*ids[:place], *prefix], tokens) for prefix, tokens in own.following.items()
            ]
            asked = Question.choice("", [each.name for each in question.options[: len(own.ids)]])
            calls.append(Readout([asked], reads, place, [own], [(0,)]))
            wanted.append((softmax(scores), sum(map(math.exp, scores))))
    jobs = [
        Job(tuple(read.prompt_ids), read.params(call.shared, ""))
        for call in calls
        for read in call.reads
    ]
    for engine in make_engine(
        name, program_cache, scheduler="chunked", max_num_batched_tokens=batch_tokens
    ):
        updates = run_updates(engine, jobs)
    scores = iter([update[-1].logprobs[0] for update in updates])
    for call, (probabilities, mass) in zip(calls, wanted, strict=True):
        (one,) = call.decisions([next(scores) for _ in call.reads])
        assert one.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert one.label_mass == pytest.approx(mass, abs=1e-5)
        assert one.are_single == (len(call.reads) == 1)
