"""Logs the lengths of answers to questions, as training data for `train_length_ranker.py`.

    python -m lab.measured.log_lengths --count 5000 --out lengths.jsonl

Each line is JSON: `prompt_ids`, `generated` (tokens) and `finish_reason`, in the order of completion.
An answer cut off at `max_tokens` has the reason "length", and would have been longer. A server's log can be converted
to this format.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from demo.tasks import mixture
from length_ranker.word_problems import prompts_of, read_questions
from orca_jax.flags import FlagParser
from orca_jax.llm import LLM
from orca_jax.values.errors import OrcaError
from orca_jax.values.request import SamplingParams

QUESTION_SEED = 1_000_000  # of generated questions; the training of the demo begins with seed 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = FlagParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--questions",
        metavar="FILE",
        help="JSON lines, each with a question (default: generated tasks of the demo)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="log to append to")
    parser.add_argument("--model", default="demo", help="model to run (default: demo)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="number of questions to skip (default: 0)"
    )
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="number of questions (default: all that follow; 1000 generated ones)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=400,
        metavar="N",
        help="limit of each answer (default: 400)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="sampling temperature (default: 0.7, as in the demo's configuration)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="nucleus sampling (default: 0.95, as in the demo's configuration)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="requests in one iteration (default: 64)",
    )
    return parser.parse_args()


def questions_of(args: argparse.Namespace) -> list[str]:
    """The questions of a file, or generated ones: the first question of each conversation."""
    if args.questions is None:
        count = 1000 if args.count is None else args.count
        conversations = islice(mixture.conversations(QUESTION_SEED), args.first, args.first + count)
        return [conversation[0].question for conversation in conversations]
    last = None if args.count is None else args.first + args.count
    return read_questions(args.questions)[args.first : last]


def log(args: argparse.Namespace) -> int:
    """Answer the questions and append to the log; returns the number of lines."""
    questions = questions_of(args)
    with LLM(
        args.model, max_num_seqs=args.max_num_seqs, scheduler="chunked", seed=args.seed
    ) as llm:
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
        )
        count = 0
        with args.out.open("a", encoding="utf-8") as out:
            for output in llm.stream(prompts_of(questions, llm.tokenizer), params):
                (answer,) = output.outputs
                line = {"prompt_ids": output.prompt_token_ids, "generated": len(answer.token_ids)}
                out.write(json.dumps({**line, "finish_reason": answer.finish_reason}) + "\n")
                out.flush()
                count += 1
    return count


if __name__ == "__main__":
    try:
        print(f"{log(parse_args())} lines")
    except OrcaError as error:
        sys.exit(f"error: {error}")
