"""The model card of the demo: its shape, its data, its training and its quality."""

from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx

from demo.bundle import Record, draw_curve
from demo.data import ASSISTANT, USER
from demo.evaluation import SEED, Result, evaluate, samples
from demo.tasks.example import HELD_OUT_EVERY
from lab.pages.markdown import table
from orca_jax.llm import LLM
from orca_jax.model.transformer import Decoder

SOURCES = {
    "tinyshakespeare.txt": "Tiny Shakespeare, 1.1 MB of plays; public domain",
    "standardebooks_sample.txt": (
        "War and Peace, Pride and Prejudice, 3.7 MB; Standard Ebooks, public-domain text, the CC0 markup removed"
    ),
}

CARD = """\
# The demo model

A Qwen3 of {size:.1f} million parameters ({layers} layers, {embed} wide, {heads} heads, {positions} positions,
byte-level BPE vocabulary of {vocab}), trained from scratch by `scripts/train_demo.py`. It lets the server run on any
machine without a download. It answers a few kinds of questions, and declines others. **It knows nothing about the
world. Use it for trying the server, and for nothing else.**

## Abilities
Greedy decoding through the engine, on questions without part in the training:

{abilities}

A conversation is right if all its answers are. Word problems and arithmetic: every step shown is true, and the result
is right. JSON: all keys and values are right. Other tasks: the answer is the expected one, word for word; for questions
about the engine, one of the answers of the fact in question. New wordings are problems in sentences without part in the
training; other held-out questions have trained patterns with other names and numbers, and those about the engine and
outside of it are hand-written or have topics of their own.

    python scripts/evaluate_demo.py --count {count} --seed {seed} --dtype float32

## Data
- Generated tasks (`scripts/demo/tasks`), without a limit: word problems with numbers up to 100 and their steps,
  arithmetic, counting, sorting, times, dates, extraction to JSON, dialogues of several turns, questions about the
  engine and questions to decline. One of {share} questions, by a hash, is never trained.
{sources}

A conversation is rendered as `{user}question{assistant}answer<|end|>`, once for each turn. `<|end|>` also ends a text.
Only answers count in the loss. The last 2 % of each text were held out. Typographic quotation marks were replaced by
plain ones. Digits and blanks are tokens of their own.

## Training
{steps:,} updates of {batch} tokens, {tokens:.1f} million tokens in all, {minutes:.0f} minutes on {hardware}.
Float32; Muon for the matrices, AdamW for the rest; the weights are stored as bfloat16.

    python scripts/train_demo.py {command}

{note}| loss, nats per token | |
|---|---|
| held-out answers | {answer_loss:.3f} |
| held-out literature | {text_loss:.3f} |

![Loss during training](loss.png)

## Samples
Greedy, the first questions of each task in the test, not selected; `-> ` is before an answer. The last ones continue a
text.

{samples}"""


def write_card(
    directory: Path,
    decoder: Decoder,
    history: Sequence[Record],
    paths: Sequence[Path],
    command: str,
    note: str,
    count: int,
) -> None:
    """Evaluate the model, and write README.md and the plot of the loss.

    Args:
        directory: the model directory.
        decoder: the model.
        history: all evaluations; the last one is the model's.
        paths: the texts; a file without an entry in `SOURCES` is listed by its name.
        command: the arguments of the script.
        note: a remark on the training.
        count: conversations of each task in the test.
    """
    draw_curve(directory / "loss.png", history)
    config = decoder.config
    last = history[-1]
    with LLM(
        str(directory),
        dtype="float32",
        scheduler="chunked",
        max_num_seqs=32,
        tensor_parallel_size=1,
    ) as llm:
        results = evaluate(llm, count)
        shown = samples(llm, results)
    text = CARD.format(
        size=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder))) / 1e6,
        layers=config.num_layers,
        embed=config.embed_dim,
        heads=config.num_heads,
        positions=config.max_positions,
        vocab=config.vocab_size,
        abilities=_table(results),
        count=count,
        seed=SEED,
        share=HELD_OUT_EVERY,
        user=USER,
        assistant=ASSISTANT,
        sources="\n".join(f"- {SOURCES.get(path.name, path.name)}" for path in paths),
        steps=last.step,
        batch=last.tokens // last.step,
        tokens=last.tokens / 1e6,
        minutes=last.minutes,
        hardware=_hardware(),
        command=command,
        note=f"{note}\n\n" if note else "",
        answer_loss=last.answer_loss,
        text_loss=last.text_loss,
        samples="\n".join(f"```text\n{question}\n-> {answer}\n```\n" for question, answer in shown),
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


def _table(results: dict[str, Result]) -> str:
    rows = [
        (name, f"{100 * result.share:.1f} %", str(len(result.answered)))
        for name, result in results.items()
    ]
    return table(("task", "right", "of"), rows).rstrip()


def _hardware() -> str:
    """The devices of this process, such as "2 cpu devices"."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind} device{'' if jax.device_count() == 1 else 's'}"
