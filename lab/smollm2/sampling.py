"""Compare sampling defaults of a chat model by its answers to common questions.

Each question of `questions.toml` is asked with each seed. An answer *ends* if the model ends it before `--max-tokens`;
it *loops* if it does not end and its last 64 tokens have at most 16 different 4-grams; it is *right* if it ends and
matches the regular expression of its question. Greedy answers do not depend on the seed, so they are asked once.
"""

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from lab.pages.markdown import line, table
from orca_jax import LLM, RequestOutput, SamplingParams
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args

QUESTIONS = Path(__file__).with_name("questions.toml")
LOOP_WINDOW = 64  # tokens
LOOP_GRAMS = 16
GRAM = 4  # tokens

Sampling = dict[str, float]
CANDIDATES: dict[str, Sampling] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalty 1.05": {"temperature": 0.0, "repetition_penalty": 1.05},
    "greedy, penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "0.2, top_p 0.9 (the model's card)": {"temperature": 0.2, "top_p": 0.9},
    "0.2, top_p 0.9, penalty 1.05": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05},
    "0.2, top_p 0.9, penalty 1.1": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
    "1.0, nothing else": {"temperature": 1.0},
}


@dataclass(frozen=True)
class Question:
    """A question, with the regular expression of a right answer if there is one."""

    text: str
    right: str | None = None


@dataclass(frozen=True)
class Judged:
    """A judgement of one answer.

    Attributes:
        ended: the model ended the answer itself.
        looped: the answer did not end, and its end repeats a few tokens.
        right: the answer ended and is right; None if the question has no single right answer.
        num_tokens: length of the answer.
    """

    ended: bool
    looped: bool
    right: bool | None
    num_tokens: int


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement and of the engine."""
    add_number(parser, "--seeds", 8, "answers to each question")
    add_number(parser, "--max-tokens", 512, "most tokens of an answer")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="ask the questions with this text in them alone (default: all)",
    )
    parser.add_argument(
        "--candidate", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), metavar="NAME",
        help="samplings to compare (default: all)",
    )  # fmt: skip
    add_engine_args(parser, model="smollm2", max_num_seqs=32, max_model_len=1024)


def run(args: argparse.Namespace) -> int:
    """Ask, judge and print a row for each candidate."""
    questions = [each for each in read_questions() if args.only is None or args.only in each.text]
    config = engine_config_from_args(args)
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    head = ("sampling", "right", "ended", "loops", "tokens, mean")
    print(table(head, ()), end="", flush=True)
    with LLM(**settings) as llm:
        for name in args.candidate:
            judged = ask(llm, questions, CANDIDATES[name], args.seeds, args.max_tokens)
            print(line((name, *figures(judged))), end="", flush=True)
    return 0


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    """Return the questions of the file."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Question(**entry) for entry in table["question"]]


def ask(
    llm: LLM, questions: Sequence[Question], sampling: Sampling, num_seeds: int, max_tokens: int
) -> list[Judged]:
    """Ask each question once for each seed, all of them together."""
    if sampling.get("temperature") == 0:
        num_seeds = 1
    asked = list(product(questions, range(num_seeds)))
    chats = [[{"role": "user", "content": question.text}] for question, _ in asked]
    params = [SamplingParams(max_tokens=max_tokens, seed=seed, **sampling) for _, seed in asked]  # type: ignore[arg-type]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [judge(question, output) for (question, _), output in zip(asked, outputs, strict=True)]


def judge(question: Question, output: RequestOutput) -> Judged:
    """Judge one answer."""
    answer = output.outputs[0]
    ended = answer.finish_reason == "stop"
    right = None
    if question.right is not None:
        right = ended and re.search(question.right, answer.text, re.IGNORECASE) is not None
    return Judged(ended, not ended and repeats(answer.token_ids), right, len(answer.token_ids))


def repeats(ids: Sequence[int]) -> bool:
    """Whether the end of an answer repeats a few tokens."""
    end = ids[-LOOP_WINDOW:]
    grams = {tuple(end[place : place + GRAM]) for place in range(len(end) - GRAM + 1)}
    return len(end) == LOOP_WINDOW and len(grams) <= LOOP_GRAMS


def figures(judged: Sequence[Judged]) -> list[str]:
    """Return the figures of one row."""
    asked = [each.right for each in judged if each.right is not None]
    return [
        f"{sum(asked)} of {len(asked)}",
        f"{sum(each.ended for each in judged)} of {len(judged)}",
        str(sum(each.looped for each in judged)),
        f"{mean(each.num_tokens for each in judged):.0f}",
    ]
