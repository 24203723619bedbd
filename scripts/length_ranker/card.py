"""The card of a ranker: what it is and how well it orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orca_jax.ranker.scorer import Scorer

CARD = """\
# A length ranker

Predicts how many tokens the model `{model}` will generate for a prompt. `--length-predictor` names its directory, and
`--scheduling-policy shortest` goes by what it says. {size} numbers: {width} for each of {vocab} tokens,
{queries} queries that take weighted means of them, and a network of {hidden} hidden units that reads these and the
prompt's length.

Learnt from {learnt} requests in {data}, {epochs} times each, by ListMLE. Scores became tokens by {held_out} others.

| Kendall's tau on these others | |
|---|---|
| this ranker | {tau:.3f} |
| the length of the prompt alone | {by_prompt:.3f} |

    python scripts/train_length_ranker.py --data {files} --model {model} --epochs {epochs} --out DIR

{about}It knows one model, one kind of prompt and one way of sampling. Where any of these changes, train it again.
"""


@dataclass(frozen=True)
class Result:
    """How training went."""

    learnt: int  # requests
    held_out: int
    tau: float  # on these, of the ranker
    by_prompt: float  # of the prompts' lengths


def write_card(
    path: Path, scorer: Scorer, result: Result, model: str, files: Sequence[str], epochs: int, about: str
) -> None:
    """Write it. `about` says what was logged."""
    arrays = (
        scorer.table,
        scorer.queries,
        scorer.hidden_kernel,
        scorer.hidden_bias,
        scorer.out_kernel,
        scorer.out_bias,
    )
    text = CARD.format(
        model=model, size=f"{sum(array.size for array in arrays):,}", width=scorer.table.shape[1],
        vocab=f"{scorer.vocab_size:,}", queries=scorer.queries.shape[1], hidden=len(scorer.hidden_bias),
        learnt=f"{result.learnt:,}", held_out=f"{result.held_out:,}", epochs=epochs, tau=result.tau,
        by_prompt=result.by_prompt,
        about=f"{about}\n\n" if about else "", data=", ".join(f"`{name}`" for name in files), files=" ".join(files),
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
