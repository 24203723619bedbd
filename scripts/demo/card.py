"""The model card of the demo: its shape, its data, its training and its quality."""

from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from tokenizers import Tokenizer

from demo.bundle import Record, draw_curve, sample
from demo.data import ASSISTANT, USER
from orca_jax.model.transformer import Decoder

SOURCES = {
    "gsm8k_train.jsonl": "GSM8K, training set: 7,473 word problems with worked answers; openai/grade-school-math, MIT",
    "gsm8k_test.jsonl": "GSM8K, test set, 1,319 problems, for evaluation only; openai/grade-school-math, MIT",
    "tinyshakespeare.txt": "Tiny Shakespeare, 1.1 MB of plays; public domain",
    "standardebooks_sample.txt": (
        "War and Peace, Pride and Prejudice, 3.7 MB; Standard Ebooks, public-domain text, the CC0 markup removed"
    ),
}

QUESTIONS = (
    "Tom has 5 apples. He buys 3 more apples and gives 2 to his sister. How many apples does Tom have now?",
    "A baker makes 12 cakes a day. Each cake costs $4. How much money does she make in 3 days?",
)
OPENINGS = ("The prince looked at her", "KING HENRY:\n")

CARD = """\
# The demo model

A GPT-2 of {size:.1f} million parameters ({layers} layers, {embed} wide, {heads} heads, {positions} positions,
byte-level BPE vocabulary of {vocab}), trained from scratch by `scripts/train_demo.py`. It lets the server run on any
machine without a download. Its English is recognisable and its answers end by themselves. **Its arithmetic is wrong
more often than not. Use it for trying the server, and for nothing else.**

## Data
{sources}

A problem is rendered as `{user}question{assistant}answer<|end|>`, without the calculator annotations. `<|end|>`
ends a text. The last 2 % of each text were held out. Typographic quotation marks were replaced by plain ones.

## Training
{steps:,} updates of {batch} tokens, {tokens:.1f} million tokens in all, {minutes:.0f} minutes on {hardware}.
Float32; Muon for the matrices, AdamW for the rest; the weights are stored as bfloat16.

    python scripts/train_demo.py {command}

| loss, nats per token | |
|---|---|
| held-out answers | {answer_loss:.3f} |
| held-out literature | {text_loss:.3f} |

![Loss during training](loss.png)

## Samples
Temperature 0.5, one draw each, not selected.

{samples}"""


def write_card(
    directory: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    history: Sequence[Record],
    paths: Sequence[Path],
    command: str,
) -> None:
    """Write README.md and the plot of the loss.

    Args:
        directory: the model directory.
        decoder: the model.
        tokenizer: its tokenizer.
        history: all evaluations; the last one is the model's.
        paths: the data; a file without an entry in `SOURCES` is listed by its name.
        command: the arguments of the script.
    """
    draw_curve(directory / "loss.png", history)
    config, last = decoder.config, history[-1]
    samples = [
        _sample(decoder, tokenizer, f"{USER}{question}{ASSISTANT}", seed) for seed, question in enumerate(QUESTIONS)
    ]
    samples += [_sample(decoder, tokenizer, opening, seed) for seed, opening in enumerate(OPENINGS)]
    text = CARD.format(
        size=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder))) / 1e6,
        layers=config.num_layers,
        embed=config.embed_dim,
        heads=config.num_heads,
        positions=config.max_positions,
        vocab=config.vocab_size,
        user=USER,
        assistant=ASSISTANT,
        sources="\n".join(f"- {SOURCES.get(path.name, path.name)}" for path in paths),
        steps=last.step,
        batch=last.tokens // last.step,
        tokens=last.tokens / 1e6,
        minutes=last.minutes,
        hardware=f"{jax.device_count()} {jax.devices()[0].device_kind} device",
        command=command,
        answer_loss=last.answer_loss,
        text_loss=last.text_loss,
        samples="\n".join(samples),
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


def _sample(decoder: Decoder, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """A prompt and its continuation, as a block of the card."""
    continuation = sample(decoder, tokenizer, prompt, max_tokens=120, temperature=0.5, seed=seed)
    return f"```text\n{prompt}⏵{continuation}\n```\n"
