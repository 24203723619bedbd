"""The card of a length ranker: its shape, its training and its quality."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orca_jax.tools.ranker.scorer import Scorer

CARD = """\
# A length ranker

Predicts the number of tokens that the model `{model}` will generate for a prompt. Pass its directory to
`--length-predictor`; `--scheduling-policy shortest` orders requests by the predictions. {size} numbers: {width} for
each of {vocab} tokens, {queries} queries that take weighted means of them, and a network of {hidden} hidden units on
these means and the prompt's length.

Trained on {learnt} requests in {data}, {epochs} epochs, with ListMLE. Another {held_out} requests calibrated scores to
tokens.

| Kendall's tau on these {held_out} | |
|---|---|
| this ranker | {tau:.3f} |
| the length of the prompt alone | {by_prompt:.3f} |

    python scripts/train_length_ranker.py --data {files} --model {model} --epochs {epochs} --out DIR

{about}It fits one model, one kind of prompt and one way of sampling. If any of these changes, train it again.
"""


@dataclass(frozen=True)
class Result:
    """The result of a training."""

    learnt: int  # requests
    held_out: int
    tau: float  # of the ranker, on the held-out requests
    by_prompt: float  # of the prompts' lengths, on the same


def write_card(
    path: Path,
    scorer: Scorer,
    result: Result,
    model: str,
    files: Sequence[str],
    epochs: int,
    about: str,
) -> None:
    """Write the card to `path`. `about` describes the logged requests."""
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
