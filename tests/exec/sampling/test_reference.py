"""Log probabilities and penalties of an engine, against the logits of transformers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from orca_jax.values.request import SamplingParams
from tests.covering import slow
from tests.test_same_tokens import (
    GPT2,
    LLAMA,
    REFERENCE,
    Job,
    few,
    greedy_jobs,
    make_engine,
    run,
    run_updates,
)

pytestmark = pytest.mark.usefixtures("compiled_when_used", "quick_compiles")


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@few
@pytest.mark.parametrize(
    ("name", "batch_tokens"),
    [
        (GPT2, 16),
        *(slow(*case) for case in ((GPT2, 4), (LLAMA, 16), ("gemma2", 16))),
    ],
)
def test_log_probabilities_and_penalties_equal_transformers(
    name: str, batch_tokens: int, program_cache: str
) -> None:
    """The scores of the prompt and of the first token, from the reference's logits of every prompt position."""
    expected = np.load(REFERENCE / name / "expected.npz")
    params = SamplingParams(
        max_tokens=2, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    penalty = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, repetition_penalty=5.0)
    prompts = [job.prompt for job in greedy_jobs(name)[0]]
    for engine in make_engine(name, program_cache, max_num_batched_tokens=batch_tokens):
        updates = run_updates(
            engine, [Job(prompt, params, at_step=i) for i, prompt in enumerate(prompts)]
        )
        penalised = run(engine, [Job(prompt, penalty) for prompt in prompts])
    for i, prompt in enumerate(prompts):
        logits = expected[f"logits_{i}"]
        reference = log_softmax(logits)
        of_prompt = updates[i][0].prompt_logprobs
        assert of_prompt is not None
        for position, entry in enumerate(of_prompt):
            line = reference[position]
            assert entry.logprob == pytest.approx(line[prompt[position + 1]], abs=1e-4)
            assert entry.top_logprobs == pytest.approx(np.sort(line)[::-1][:2], abs=1e-4)
        assert len(of_prompt) == len(prompt) - 1
        first = updates[i][0].logprobs[0]
        assert (first.rank, first.top_ids[0]) == (1, int(reference[-1].argmax()))
        assert first.top_logprobs == pytest.approx(np.sort(reference[-1])[::-1][:3], abs=1e-4)
        changed = logits[-1].copy()  # RepetitionPenaltyLogitsProcessor
        score = changed[list(prompt)]
        changed[list(prompt)] = np.where(score < 0, score * 5.0, score / 5.0)
        assert penalised[i] == [int(changed.argmax())]


TEMPERATURES = (0.6, 1.0, 1.3)
TOP_K = 3


@few
def test_processed_log_probabilities_equal_transformers(program_cache: str) -> None:
    """Those of a prompt and of a first token, at temperatures, and with a filter."""
    expected = np.load(REFERENCE / GPT2 / "expected.npz")
    prompt = list(greedy_jobs(GPT2)[0][0].prompt)
    logits = expected["logits_0"]
    jobs = [
        Job(
            prompt,
            SamplingParams(
                max_tokens=1,
                temperature=temperature,
                top_k=top_k,
                seed=7,
                logprobs=TOP_K,
                prompt_logprobs=0,
            ),
        )
        for temperature in TEMPERATURES
        for top_k in (0, TOP_K)
    ]
    for engine in make_engine(GPT2, program_cache, logprobs_mode="processed_logprobs"):
        updates = run_updates(engine, jobs)
    for job, (update, *_) in zip(jobs, updates, strict=True):
        temperature = job.params.temperature
        reference = log_softmax(logits[: len(prompt)] / temperature)
        if job.params.top_k:
            least = np.sort(reference, axis=-1)[:, -TOP_K][:, None]
            reference = log_softmax(np.where(reference >= least, reference, -np.inf))
        tolerance = 2e-5 / min(temperature, 1)
        assert update.prompt_logprobs is not None
        found = [entry.logprob for entry in update.prompt_logprobs]
        wanted = reference[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(found, wanted, atol=tolerance)
        (first,) = update.logprobs
        last = reference[len(prompt) - 1]
        assert first.logprob == pytest.approx(last[update.new_ids[0]], abs=tolerance)
        np.testing.assert_allclose(first.top_logprobs, last[list(first.top_ids)], atol=tolerance)
