"""Trains the small model of checkpoints/demo from generated tasks and text files.

    python scripts/train_demo.py --data novel.txt --minutes 60 --devices 2

The length of the training is a time, not a number of steps: the clock sets the learning rate. On a machine with other
work, --tokens sets the length in tokens instead. To continue an interrupted run (Ctrl-C), add --resume. To end a run
early, interrupt it and resume with fewer --minutes or --tokens: the rate then falls faster. Each evaluation saves the
state to --run-dir, and the best model so far to --out.

XLA allocates a gigabyte for each update and returns it to the system. On Linux, glibc keeps it with these settings,
which saves a quarter of the time:

    export GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.hugetlb=1
    GLIBC_TUNABLES=$GLIBC_TUNABLES:glibc.malloc.trim_threshold=16000000000:glibc.malloc.top_pad=1000000000
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM, getsignal, signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from demo.bundle import Record, write_model
from demo.card import write_card
from demo.data import Packer, Rows, read_texts, split_texts, train_tokenizer
from demo.exam import Exam
from demo.tasks import mixture
from demo.training import Trainer, learning_rate
from orca_jax.flags import FlagParser
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerKind, RopeConfig

# row lengths in turn: mostly short ones, which cost less
SHAPES = (256, 256, 256, 256, 256, 256, 256, 1024)
TEXT_ROWS = 16  # one of so many rows is literature


@dataclass
class Run:
    """The progress of a run; saved beside its arrays."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        nargs="*",
        default=[],
        help="text files; of each, the last 2 %% are held out",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoints/demo"), help="model directory (%(default)s)"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="state of the run (%(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="length of the whole run (%(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=float,
        default=0.0,
        help="length of the whole run in tokens, not in minutes",
    )
    parser.add_argument(
        "--eval-minutes", type=float, default=5.0, help="time between evaluations (%(default)s)"
    )
    parser.add_argument(
        "--decay-from",
        type=float,
        default=0.3,
        help="share of the time before the learning rate falls (%(default)s)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="devices to use; on a CPU, as many as cores (default: all there are)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="tokens per update, a multiple of 1024 (%(default)s)",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=200,
        help="questions of each task in the last test (%(default)s)",
    )
    parser.add_argument("--note", default="", help="remark on the training for the card")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (%(default)s)")
    parser.add_argument("--embed", type=int, default=256, help="width of the model (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    parser.add_argument(
        "--vocab", type=int, default=2048, help="size of the vocabulary (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of initial values and batches (%(default)s)"
    )
    args = parser.parse_args(arguments)
    for flag, remedy in problems(args):
        parser.error(f"{flag} {remedy}")
    return args


def problems(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The wrong flags, each with its remedy."""
    for path in args.data:
        if not path.is_file():
            yield "--data", f"must name text files: {path} is not a file"
    if args.batch_tokens < max(SHAPES) or args.batch_tokens % max(SHAPES):
        yield "--batch-tokens", f"must be a multiple of {max(SHAPES)}, such as 4096"
    elif args.devices and args.batch_tokens // max(SHAPES) % args.devices:
        yield (
            "--devices",
            f"must divide the {args.batch_tokens // max(SHAPES)} rows of {max(SHAPES)} tokens of an update",
        )
    if not 0 <= args.decay_from < 1:
        yield "--decay-from", "must be a share below 1, such as 0.3"
    if args.heads < 1 or args.embed % args.heads:
        yield "--heads", f"must divide --embed, {args.embed}"
    if args.count < 2:
        yield "--count", "must be at least 2, for the samples of the card"
    if args.resume and not state_of(args.run_dir).is_dir():
        yield "--resume", f"needs a saved state in {args.run_dir}: start once without it"


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The shape of a small Qwen3: rotary positions, norms of queries and keys."""
    return ModelConfig(
        family="qwen3",
        vocab_size=args.vocab,
        layers=(LayerKind(rope=RopeConfig()),) * args.layers,
        embed_dim=args.embed,
        num_heads=args.heads,
        num_kv_heads=args.heads,
        head_dim=args.embed // args.heads,
        mlp_dim=3 * args.embed,
        max_positions=max(SHAPES),
        norm="rmsnorm",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        tied_embeddings=True,
        qk_norm="head",
    )


def command_line(args: argparse.Namespace) -> str:
    """The arguments needed to repeat the run; files without their folders."""
    length = f"--tokens {args.tokens:g}" if args.tokens else f"--minutes {args.minutes:g}"
    data = " ".join(path.name for path in args.data)
    parts = [f"--data {data}" if data else "", length, f"--decay-from {args.decay_from:g}"]
    plain = parse_arguments([])
    for name in ("devices", "batch_tokens", "layers", "embed", "heads", "vocab", "seed"):
        if getattr(args, name) != getattr(plain, name):
            parts.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    return " ".join(filter(None, parts))


def best(history: list[Record]) -> Record:
    """The evaluation with the least loss on answers."""
    return min(history, key=lambda record: record.answer_loss)


def state_of(directory: Path) -> Path:
    """The saved state of a run: the newest one, or the one before it if a save was interrupted between two renames."""
    newest = directory / "state"
    return newest if newest.is_dir() else directory / "state.old"


def save_run(directory: Path, run: Run, trainer: Trainer) -> None:
    """Write the state beside the old one, then swap them: an interruption leaves a complete state."""
    fresh = directory / "state.new"
    newest = directory / "state"
    old = directory / "state.old"
    shutil.rmtree(fresh, ignore_errors=True)
    leaves = {
        str(i): leaf for i, leaf in enumerate(jax.tree.leaves((trainer.params, trainer.state)))
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(fresh.absolute() / "arrays", args=ocp.args.PyTreeSave(leaves))
    (fresh / "run.json").write_text(json.dumps(asdict(run)), encoding="utf-8")
    if newest.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        newest.rename(old)
    fresh.rename(newest)
    shutil.rmtree(old, ignore_errors=True)


def restore_run(directory: Path, trainer: Trainer) -> Run:
    """Read the files of `save_run` into `trainer`; returns the progress."""
    leaves, structure = jax.tree.flatten((trainer.params, trainer.state))
    on_host = {str(i): ocp.RestoreArgs(restore_type=np.ndarray) for i in range(len(leaves))}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays: dict[str, Any] = checkpointer.restore(
            (state_of(directory) / "arrays").absolute(),
            args=ocp.args.PyTreeRestore(on_host, restore_args=on_host),
        )
    restored = [
        jax.device_put(arrays[str(i)].astype(leaf.dtype), leaf.sharding)
        for i, leaf in enumerate(leaves)
    ]
    trainer.params, trainer.state = jax.tree.unflatten(structure, restored)
    saved = json.loads((state_of(directory) / "run.json").read_text(encoding="utf-8"))
    return Run(**{**saved, "history": [Record(**record) for record in saved["history"]]})


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collects signals in a list, for training to check between updates."""
    received: list[int] = []
    before = {number: getsignal(number) for number in (SIGINT, SIGTERM)}
    for number in before:
        signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal(number, handler)


class Training:
    """One run: draws batches, updates, evaluates, saves."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        texts = read_texts(args.data)
        heads, tails = split_texts(texts)
        args.run_dir.mkdir(parents=True, exist_ok=True)
        tokenizer_file = args.run_dir / "tokenizer.json"
        if not args.resume:
            train_tokenizer(texts, mixture.pieces(args.seed), args.vocab).save(str(tokenizer_file))
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        config = model_config(args)
        self.trainer = Trainer(
            Decoder(
                config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(args.seed), vocab_rows=args.vocab
            ),
            jax.devices()[: args.devices or None],
        )
        self.run = restore_run(args.run_dir, self.trainer) if args.resume else Run()
        # The position in the data is not saved: the step seeds the random state of a resumed run instead.
        seed = args.seed + self.run.step
        self.packer = Packer(
            self.tokenizer, heads, mixture.pieces(seed), config.max_positions, seed
        )
        self.exam = Exam(self.tokenizer, tails)

    def draw(self) -> Rows:
        """The next batch."""
        length = min(SHAPES[self.run.step % len(SHAPES)], self.args.batch_tokens)
        rows = self.args.batch_tokens // length
        return self.packer.draw(rows, length, rows // TEXT_ROWS if self.packer.has_texts else 0)

    def train(self) -> None:
        """Update until the run has its length, or a signal arrives."""
        run = self.run
        losses = []
        since_exam = 0.0
        with (
            interruptible() as signals,
            tqdm(total=100, initial=int(100 * self.progress), unit="%") as bar,
        ):
            while self.progress < 1 and not signals:
                begin = time.monotonic()
                losses.append(self.trainer.step(self.draw(), self.rate()))
                run.step = run.step + 1
                run.tokens = run.tokens + self.args.batch_tokens
                taken = time.monotonic() - begin
                run.seconds = run.seconds + taken
                since_exam = since_exam + taken
                bar.set_postfix(
                    step=run.step,
                    loss=f"{np.mean(losses[-20:]):.3f}",
                    tokens=f"{run.tokens / 1e6:.2f}M",
                )
                bar.update(int(100 * self.progress) - bar.n)
                if since_exam > self.args.eval_minutes * 60 or self.progress >= 1 or signals:
                    self.evaluate(float(np.mean(losses)))
                    losses, since_exam = [], 0.0

    @property
    def progress(self) -> float:
        """The share of the run that is over."""
        if self.args.tokens:
            return self.run.tokens / self.args.tokens
        return self.run.seconds / (self.args.minutes * 60)

    def rate(self) -> float:
        """The relative learning rate of the next update."""
        return learning_rate(self.run.step, self.progress, self.args.decay_from)

    def evaluate(self, train_loss: float) -> None:
        """Measure, save the state, and write the model if it is the best so far."""
        run = self.run
        scores = asdict(self.exam.score(self.trainer))
        record = Record(run.step, run.tokens, round(run.seconds / 60, 2), train_loss, **scores)
        run.history.append(record)
        tqdm.write(json.dumps(asdict(record)))
        save_run(self.args.run_dir, run, self.trainer)
        if best(run.history) is record:
            write_model(self.args.out, self.trainer.decoder, self.tokenizer)

    def describe(self) -> None:
        """Write the card of the model in --out, the best one, as saved."""
        decoder = load_decoder(self.args.out, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
        history = self.run.history[: self.run.history.index(best(self.run.history)) + 1]
        args = self.args
        write_card(args.out, decoder, history, args.data, command_line(args), args.note, args.count)


if __name__ == "__main__":
    arguments = parse_arguments(sys.argv[1:])
    if arguments.devices:
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    training = Training(arguments)
    training.train()
    training.describe()
