"""Measure the first token of a long prompt: computed, computed and saved, and read after the process was killed.

Each engine is a process of its own, on one machine in turns. It is killed without warning when its pages are saved.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.values.errors import ConfigError

SHARE = 0.1  # of the time to compute a prompt: the most for reading it
_QUIET = 1.0  # seconds without a new file: all pages are saved
_MOST_WAITS = 60
_LONGEST = 600.0  # seconds of a process


class Measured(NamedTuple):
    """An engine of one process.

    Attributes:
        start: seconds until it was ready.
        first: seconds until the first token.
        cached: tokens of the prompt that were not computed.
        token: the first token.
    """

    start: float
    first: float
    cached: int
    token: int


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="smollm2", help="a model as of `orca-jax serve`")
    add_number(parser, "--tokens", 8000, "tokens of the prompt")
    add_number(parser, "--repeat", 3, "rounds; the result is the median")


def run(args: argparse.Namespace) -> int:
    """Print a table and a line of JSON. Return 1 if reading takes more than `SHARE` of computing, or the token differs.

    Raises:
        ConfigError: a number is too small.
    """
    if args.tokens < 256 or args.repeat < 1:
        raise ConfigError("tokens must be at least 256 and repeat at least 1", param="tokens")
    _measured(args.model, args.tokens, 0, None)  # compiles the programs
    rounds = [_round(args.model, args.tokens, seed) for seed in range(1, args.repeat + 1)]
    row = _medians(rounds)
    is_same = all(map(_is_same, rounds))
    print_table(f"{args.model}, the first token of {args.tokens} tokens", row)
    print(json.dumps({"rounds": rounds, "hardware": hardware(), "is_same": is_same, **row}))
    return int(not is_same or row["read_over_computed"] > SHARE)


def _round(model: str, tokens: int, seed: int) -> dict[str, Measured]:
    """Measure each kind of engine with a prompt that no earlier one had."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "computed": _measured(model, tokens, seed, None),
            "saved": _measured(model, tokens, seed, folder),
            "read": _measured(model, tokens, seed, folder),
        }


def _is_same(found: dict[str, Measured]) -> bool:
    return len({each.token for each in found.values()}) == 1


def _medians(rounds: list[dict[str, Measured]]) -> dict[str, float]:
    """The medians of seconds, and their ratios to those of computing without files."""
    row: dict[str, float] = {}
    for kind in rounds[0]:
        row[f"{kind}_first_s"] = statistics.median([found[kind].first for found in rounds])
        row[f"{kind}_start_s"] = statistics.median([found[kind].start for found in rounds])
    row["cached_tokens"] = min(found["read"].cached for found in rounds)
    row["saved_over_computed"] = row["saved_first_s"] / row["computed_first_s"]
    row["read_over_computed"] = row["read_first_s"] / row["computed_first_s"]
    return row


def _measured(model: str, tokens: int, seed: int, folder: str | None) -> Measured:
    """Measure one engine in a process, and kill it when its files stay the same."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(model, tokens, seed, folder, sender))
    process.start()
    sender.close()  # else the end of the process would not be seen
    try:
        if not receiver.poll(_LONGEST):
            raise TimeoutError(f"no token of {model} within {_LONGEST:.0f} s")
        try:
            found = Measured(*receiver.recv())
        except EOFError:
            raise ConfigError(f"the engine of {model} failed, as above", param="model") from None
        if folder is not None:
            _await_quiet(Path(folder))
    finally:
        process.kill()
        process.join()
    return found


def _await_quiet(folder: Path) -> None:
    """Wait until there are files and no more are added."""
    before = 0
    for _ in range(_MOST_WAITS):
        time.sleep(_QUIET)
        number = len(list(folder.rglob("*.kv")))
        if number and number == before:
            return
        before = number


def _serve(model: str, tokens: int, seed: int, folder: str | None, sender: Connection) -> None:
    """Build an engine, generate one token, and wait for being killed."""
    from orca_jax import LLM, SamplingParams

    begin = time.perf_counter()
    settings: Mapping[str, Any] = {} if folder is None else {"kv_disk": folder}
    llm = LLM(model, max_model_len=tokens + 128, max_num_seqs=8, progress=False, **settings)
    start = time.perf_counter() - begin
    draw = random.Random(seed)
    prompt = [draw.randrange(10, 1000) for _ in range(tokens)]
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    first = time.perf_counter() - begin
    cached = output.num_cached_tokens or 0
    # an idle `LLM` saves no more, since it has no thread of its own
    others = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    llm.generate([prompt[:1]], others, use_tqdm=False)
    sender.send((start, first, cached, output.outputs[0].token_ids[0]))
    time.sleep(_LONGEST)
