"""Embeddings of real models: equal to transformers' hidden vectors, in chunks, on two devices, beside generation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"
TOLERANCE = 2e-5
EXPECTED = np.load(FIXTURES / "embeddings.npz")
NAMES = sorted({key.partition("/")[0] for key in EXPECTED})

pytestmark = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")


def engine(name: str, cache: str, **settings: Any) -> LLM:
    options = {
        "tokenizer": "byte",
        "compile_cache": cache,
        "progress": False,
        "dtype": "float32",
        "num_pages": 60,
    }
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 8,
        "strict_compile": True,
    }
    model = str(FIXTURES / "reference" / name)
    return LLM(model, **{**options, **sizes, "tensor_parallel_size": 1, **settings})


def assert_equal(llm: LLM, name: str) -> None:
    stored = np.load(FIXTURES / "reference" / name / "expected.npz")
    prompts = [stored[f"ids_{number}"].tolist() for number in range(4)]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for pooling in ("last", "mean"):
        texts = llm.stream(prompts, greedy)
        llm._turns.step()
        outputs = llm.embed(prompts, pooling, normalize=False, use_tqdm=False)  # type: ignore[arg-type]
        for number, output in enumerate(outputs):
            theirs = EXPECTED[f"{name}/{pooling}_{number}"]
            np.testing.assert_allclose(
                output.outputs.embedding, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max()
            )
        for text in texts:
            wanted = stored[f"greedy_{prompts.index(list(text.prompt_token_ids))}"]
            assert list(text.outputs[0].token_ids) == wanted.tolist(), (
                "the texts beside them are those of transformers"
            )
    assert llm.engine.executor.stats.compiles_while_serving == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 64])
def test_embeddings_are_those_of_transformers(name: str, budget: int, program_cache: str) -> None:
    """In chunks of four tokens, and with whole prompts."""
    with engine(name, program_cache, max_num_batched_tokens=budget) as llm:
        assert_equal(llm, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_embeddings_on_two_devices(parallel: dict[str, int], program_cache: str) -> None:
    with engine("llama-12-heads-3-groups", program_cache, **parallel) as llm:
        assert_equal(llm, "llama-12-heads-3-groups")
