"""Asks the demo model questions that it was not trained with, and prints the share of right answers.

    python scripts/evaluate_demo.py --count 200

The last line is JSON: the share by task, and the number of conversations.
"""

import argparse
import json
import sys

from demo.evaluation import SEED, evaluate, mistakes
from orca_jax.flags import FlagParser
from orca_jax.llm import LLM
from orca_jax.values.errors import OrcaError


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model to ask (default: demo)")
    parser.add_argument(
        "--count",
        type=int,
        default=200,
        metavar="N",
        help="conversations of each task (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        metavar="N",
        help="seed of the questions (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", default="float32", help="type of the computation (default: %(default)s)"
    )
    parser.add_argument(
        "--show-mistakes",
        type=int,
        default=0,
        metavar="N",
        help="wrong answers of each task to print (default: 0)",
    )
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count must be at least 1")
    return args


def main(args: argparse.Namespace) -> None:
    """Ask, and print a table, the mistakes and one line of JSON."""
    with LLM(args.model, dtype=args.dtype, scheduler="chunked", max_num_seqs=32) as llm:
        results = evaluate(llm, args.count, args.seed)
    wrong = mistakes(results)
    for name, result in results.items():
        print(
            f"{name:32} {result.num_right:4} of {len(result.answered):4}  {100 * result.share:5.1f} %"
        )
        for question, given, right in wrong[name][: args.show_mistakes]:
            print(f"    {question!r}\n      given {given!r}\n      right {right!r}")
    shares = {name: result.share for name, result in results.items()}
    print(
        json.dumps({"model": args.model, "seed": args.seed, "count": args.count, "right": shares})
    )


if __name__ == "__main__":
    try:
        main(parse_args())
    except OrcaError as error:
        sys.exit(f"error: {error}")
