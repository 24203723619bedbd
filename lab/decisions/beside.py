"""Time and probabilities of one call with many questions, beside the server of vLLM with the same model.

Both servers run at once, each on all processors and with its prefix cache. They take the same calls of `/v1/systemone`
in turns, and the other one is first in every other round. Each call has a salt of its own, so no call finds the state
of an earlier one. Times are wall times, and the processor times of each server.

Then each server answers the call in company: with other calls at the same time. The record has the largest change of a
probability, and the number of questions whose probabilities changed, from the first answer: of the same call again, of
the call from the cache, and of the call in company.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.decisions.calls import state
from lab.decisions.record import ROOT, add_save, finish
from lab.decisions.turns import OURS, THEIRS, Bodies, Body, client, measured
from lab.decisions.work import choices, instructions, state_of
from lab.peers.environment import Environment, default_folder, prepare_environment
from lab.peers.inputs import model_for_peers
from lab.peers.registry import PEERS
from lab.peers.side import Side
from orca_jax.flags import add_number
from orca_jax.helpers.bundled import demo_directory
from orca_jax.text.tokenizer import load_tokenizer

_SHAPE = ROOT / "lab" / "peers" / "shapes" / "qwen3"
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--model",
        default=str(_SHAPE),
        metavar="DIR",
        help="model directory; without weights, they are random, and the tokenizer is the demo's "
        "(default: Qwen3 with 600 million numbers)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name in the record (default: the model, and vLLM's mode)"
    )
    parser.add_argument(
        "--environment", metavar="DIR", help="of vLLM, made if it does not exist (default: a cache)"
    )
    parser.add_argument(
        "--mode",
        choices=PEERS[THEIRS].modes,
        default=PEERS[THEIRS].server_mode,
        help="vLLM's way of running (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="numbers of the model")
    add_number(parser, "--questions", 64, "questions of the call")
    add_number(parser, "--tokens", 2000, "tokens of the state, about")
    add_number(parser, "--company", 8, "other calls at the same time")
    add_number(parser, "--rounds", 3, "calls to each server, alone and in company")
    add_number(
        parser,
        "--pause",
        1.0,
        "before each call: threads of OpenMP wait actively",
        metavar="SECONDS",
    )
    add_number(parser, "--timeout", 1800.0, "longest start", metavar="SECONDS")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures. The exit status is 1 if vLLM is faster, or a probability of ours changed."""
    peer = PEERS[THEIRS]
    place = Path(args.environment) if args.environment else default_folder(THEIRS)
    environment = Environment(THEIRS, peer, place, prepare_environment(peer, place))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = decision_model(args.model, Path(folder) / "model")
        sides = {
            name: stack.enter_context(Side(f"the server of {name}", command, args.timeout))
            for name, command in commands(args, model, environment).items()
        }
        about = {name: side.about() for name, side in sides.items()}
        clients = {name: client(each.pop("url")) for name, each in about.items()}
        result = measured(clients, bodies(args, model), args.rounds, args.pause)
    name = args.name or f"{Path(args.model).name}, vLLM {args.mode}"
    finish(args, "beside", name, {**result, **settings(args), "servers": about})
    ours = result["changed"][OURS].values()
    return int(result["ratio"]["wall"] < 1 or any(each["questions"] for each in ours))


def decision_model(model: str, folder: Path) -> Path:
    """The directory of the model; one with random weights is written into `folder`, with the demo's texts."""
    path = model_for_peers(model, 0, folder)
    if path == folder.absolute():
        for name in _TEXTS:
            shutil.copy(demo_directory() / name, path / name)
    return path


def commands(
    args: argparse.Namespace, model: Path, environment: Environment
) -> dict[str, list[str]]:
    """The commands of both servers."""
    threads = len(os.sched_getaffinity(0))
    flags = ["--model", str(model), "--dtype", args.dtype, "--threads", str(threads)]
    flags += ["--max-num-seqs", str(args.questions), "--enable-prefix-caching"]
    ours = [sys.executable, "-m", "lab.peers.own_server", "--served-model-name", "model"]
    theirs = environment.command(environment.peer.server, threads)
    return {OURS: [*ours, *flags], THEIRS: [*theirs, *flags, "--mode", args.mode]}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that the record names."""
    names = ("dtype", "questions", "tokens", "company", "rounds", "mode")
    return {name: getattr(args, name) for name in names}


def bodies(args: argparse.Namespace, model: Path) -> Bodies:
    """The calls: the measured one, and others with shorter states and fewer questions."""
    tokenizer = load_tokenizer(str(model))
    text = state_of(args.tokens, lambda words: len(tokenizer.encode(words, False)))
    draw = random.Random(1)
    others = [_body(state(draw, 4 * place + 4), place + 1) for place in range(args.company)]
    return Bodies(_body(text.strip(), args.questions), others)


def _body(text: str, number: int) -> Body:
    return {"model": "model", "state": text, "questions": choices(instructions(number))}
