"""A tiny GPT is trained with Flax NNX, Optax and Orbax, and the engine samples it while it trains.

    python examples/train_and_sample.py

The GPT learns a rhyme by heart. After every round of training its parameters become the weights of the engine, without
a file and without a compilation. The engine then continues the lines of the rhyme, and reports the log probability of
each generated character.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from orca_jax import LLM, SamplingParams
from orca_jax.model.describe import read_model_config
from orca_jax.model.transformer import Decoder

RHYME = (
    "Twinkle, twinkle, little star,",
    "How I wonder what you are!",
    "Up above the world so high,",
    "Like a diamond in the sky.",
)
# ids of bytes and an end token, characters of a line, and of a prompt
VOCAB, LENGTH, SHOWN = 257, 32, 6
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": LENGTH,
    "vocab_size": VOCAB,
    "eos_token_id": 256,
    "bos_token_id": 256,
}
PARAMS = SamplingParams(max_tokens=LENGTH - SHOWN, temperature=0, logprobs=0)


class Report(NamedTuple):
    """The result of a training."""

    losses: list[float]  # of the last batch of each round
    right: list[float]  # part of the sampled characters that are right, after each round
    train_seconds: float
    update_seconds: float
    sample_seconds: float


def attend(
    layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, cache: None
) -> tuple[jax.Array, None]:
    """Causal attention within each sequence of the merged tokens. Training keeps no KV cache."""
    split = (x.reshape(-1, LENGTH - 1, *x.shape[1:]) for x in (q, k, v))
    return jax.nn.dot_product_attention(*split, is_causal=True).reshape(q.shape), None


def loss_of(model: Decoder, batch: jax.Array) -> jax.Array:
    """Mean cross entropy of the characters."""
    inputs = batch[:, :-1]
    positions = jnp.tile(jnp.arange(LENGTH - 1), len(batch))
    hidden, _ = model(inputs.reshape(-1), positions, attend, None)
    scores = model.unembed(hidden).reshape(*inputs.shape, -1)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, 1:]).mean()


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """One step of AdamW. Returns the loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def train(folder: Path, rounds: int, steps: int) -> Report:
    """Train and sample in turn, and save the model to `folder`/params with Orbax."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = read_model_config(folder)
    model = Decoder(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0), vocab_rows=VOCAB)
    schedule = optax.cosine_decay_schedule(3e-3, rounds * steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    saver = ocp.CheckpointManager(folder / "params")
    saver.save(0, args=ocp.args.StandardSave({"model": nnx.state(model)}))
    saver.wait_until_finished()
    llm = LLM(
        str(folder), tokenizer="byte", dtype="float32", max_num_seqs=4, max_num_batched_tokens=32
    )
    lines = np.array([list(line.ljust(LENGTH).encode()) for line in RHYME], np.int32)
    prompts, answers = [line[:SHOWN] for line in RHYME], lines[:, SHOWN:]
    batch = jnp.asarray(lines)
    losses, right, seconds = (
        list[float](),
        list[float](),
        dict.fromkeys(("train", "update", "sample"), 0.0),
    )
    for number in range(rounds):
        begun = time.perf_counter()
        for _ in range(steps):
            loss = train_step(model, optimizer, batch)
        losses.append(float(loss))
        trained = time.perf_counter()
        version = llm.update_params(nnx.state(model))
        updated = time.perf_counter()
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        sampled = time.perf_counter()
        assert {output.weight_version for output in outputs} == {version}
        texts = [output.outputs[0].token_ids for output in outputs]
        texts = np.array([[*ids, *[VOCAB] * (LENGTH - SHOWN - len(ids))] for ids in texts])
        right.append(float((texts == answers).mean()))
        sure = np.exp(
            np.mean([output.outputs[0].cumulative_logprob for output in outputs])
            / PARAMS.max_tokens
        )
        print(f"round {number + 1}: loss {losses[-1]:.3f}, {right[-1]:.0%} of the sampled characters are right, "
              f"mean probability {sure:.2f}: {outputs[0].outputs[0].text.strip()!r}")  # fmt: skip
        for name, span in (
            ("train", trained - begun),
            ("update", updated - trained),
            ("sample", sampled - updated),
        ):
            seconds[name] += span
    saver.save(rounds * steps, args=ocp.args.StandardSave({"model": nnx.state(model)}))
    saver.close()
    before = [output.outputs[0].token_ids for output in outputs]
    llm.update_params(folder)  # the saved model, as another process would take it
    assert [
        output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ] == before
    llm.close()
    return Report(losses, right, seconds["train"], seconds["update"], seconds["sample"])


def main() -> None:
    """Train, and print the time of each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of updates of the engine")
    parser.add_argument("--steps", type=int, default=20, help="steps of training in each round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = train(Path(folder), args.rounds, args.steps)
    total = report.train_seconds + report.update_seconds + report.sample_seconds
    print(f"{total:.1f} s: {report.train_seconds / total:.0%} training, {report.sample_seconds / total:.0%} sampling, "
          f"{report.update_seconds / total:.1%} updates of the weights")  # fmt: skip
    assert report.right[-1] > 0.9, "the training did not converge"


if __name__ == "__main__":
    main()
