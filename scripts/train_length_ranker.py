"""Trains a model that predicts the lengths of answers, from a log of requests.

    python -m lab.measured.log_lengths --count 5000 --out lengths.jsonl
    python scripts/train_length_ranker.py --data lengths.jsonl --model demo --out ranker
    ./scripts/serve --scheduler chunked --scheduling-policy shortest --length-predictor ranker

A sixth of the log is held out. The rest trains the order; the held-out part calibrates scores to tokens.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lab.rank_correlation import kendall_tau
from length_ranker.card import Result, write_card
from length_ranker.export import calibrate, save_scorer, scorer_of
from length_ranker.log import read_log
from length_ranker.training import Settings, scores_of, train
from orca_jax.flags import FlagParser
from orca_jax.helpers.bundled import model_directory
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.tools.ranker.storage import PARAMS
from orca_jax.values.errors import OrcaError

HELD_OUT = 1 / 6


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    defaults = Settings()
    parser = FlagParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="logs of JSON lines, see log_lengths.py",
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="served model; the ranker uses its embedding (default: demo)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory to create, without a ranker in it",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=defaults.epochs,
        metavar="N",
        help=f"passes over the log (default: {defaults.epochs})",
    )
    parser.add_argument(
        "--about",
        default="",
        metavar="TEXT",
        help="description of the logged requests and their licence, for the card",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of initial values and batches (default: 0)",
    )
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Train, save, and print Kendall's tau on the held-out requests."""
    if (args.out / PARAMS).exists():
        raise ValueError(
            f"--out: {args.out} already holds a ranker; choose another directory, or remove it"
        )
    source = model_directory(args.model) or args.model
    decoder = load_decoder(source, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))
    tokenizer = load_tokenizer(source)
    assert decoder.embedding is not None, "a whole model"
    vectors = np.asarray(decoder.embedding(jnp.arange(decoder.config.vocab_size)))
    learnt, held_out = read_log(args.data, tokenizer).split(HELD_OUT, args.seed)
    ranker = train(vectors, learnt, Settings(epochs=args.epochs, seed=args.seed))
    scores = scores_of(ranker, held_out)
    by_prompt = kendall_tau(held_out.is_token.sum(axis=1), held_out.lengths)
    result = Result(len(learnt), len(held_out), kendall_tau(scores, held_out.lengths), by_prompt)
    args.out.mkdir(parents=True, exist_ok=True)
    scorer = scorer_of(ranker, calibrate(scores, held_out.lengths))
    save_scorer(scorer, args.out)
    write_card(
        args.out / "README.md",
        scorer,
        result,
        args.model,
        [path.name for path in args.data],
        args.epochs,
        args.about,
    )
    print(
        f"Kendall's tau on {result.held_out} held-out requests: {result.tau:.3f}; by length of prompt {by_prompt:.3f}"
    )


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OrcaError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
