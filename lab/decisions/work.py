"""Time of one call with many questions about a long state, beside one prompt of as many tokens, and beside chats.

All calls go to one server without the use of cached prefixes between calls (`--no-enable-prefix-caching`), in turns.
The plain prompt has as many tokens as the state once and all questions. The chats, one for each question, have the
state and the question, and one token as answer; they are sent together. Times are wall times, and the processor times
of the server, which other processes on the machine disturb less.
"""

import argparse
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import psutil

from lab.decisions.calls import state
from lab.decisions.record import ROOT, add_save, finish
from lab.judges.serving import serving
from orca_jax.flags import add_number
from orca_jax.helpers.bundled import model_directory
from orca_jax.text.tokenizer import load_tokenizer

NAME = "decided"


class Spent(NamedTuple):
    """Seconds of a call: elapsed ones, and those of the server's processors."""

    wall: float
    cpu: float


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="the model that decides"
    )
    parser.add_argument("--name", metavar="NAME", help="name in the record (default: the model)")
    parser.add_argument("--dtype", default="bfloat16", help="numbers of the model")
    add_number(parser, "--questions", 64, "questions of a call")
    add_number(parser, "--tokens", 2000, "tokens of the state, about")
    add_number(parser, "--rounds", 3, "calls of each kind")
    add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the ratios. The exit status is 1 if a goal is missed: 1.25 of a prompt, a tenth of chats."""
    path = model_directory(args.model)
    tokenizer = load_tokenizer(path)
    text = state_of(args.tokens, lambda words: len(tokenizer.encode(words, False)))
    key = f"sk-{secrets.token_hex(16)}"
    flags = ["--model", path, "--served-model-name", NAME, "--dtype", args.dtype]
    flags += ["--no-enable-prefix-caching", "--max-num-seqs", str(args.questions)]
    with serving(ROOT, flags, key) as server:
        caller = Caller(f"http://127.0.0.1:{server.port}", key, text, args.questions)
        tokens = caller.decide()
        found = caller.measured(tokens, tokenizer.encode(text, False), args.rounds)
    result = {**ratios(found), "tokens": tokens, "questions": args.questions, "dtype": args.dtype}
    finish(args, "work", args.name or args.model, result)
    return int(result["of_a_prompt_cpu"] > 1.25 or result["of_chats_cpu"] > 0.1)


def state_of(tokens: int, count: Callable[[str], int]) -> str:
    """A state of about so many tokens."""
    draw = random.Random(0)
    text = ""
    while count(text) < tokens:
        text += state(draw, 8) + "\n"
    return text


def instructions(number: int) -> list[str]:
    """The texts of so many questions."""
    return [
        f"Question number {index}: which of these does the text speak of?"
        for index in range(number)
    ]


def choices(texts: Sequence[str]) -> dict[str, Any]:
    """Questions of `/v1/systemone` with these texts, each with four options."""
    criteria = {"the sea": None, "a house": None, "a dog": None, "something else": None}
    return {
        str(index): {"type": "choice", "instructions": each, "criteria": criteria}
        for index, each in enumerate(texts)
    }


def ratios(found: dict[str, list[Spent]]) -> dict[str, Any]:
    """The medians of all kinds of calls, and their ratios."""
    medians = {}
    for kind, spent in found.items():
        walls, cpus = zip(*spent, strict=True)
        medians[kind] = {"wall": statistics.median(walls), "cpu": statistics.median(cpus)}
    result: dict[str, Any] = {"seconds": medians}
    for other in ("prompt", "chats"):
        for clock in ("wall", "cpu"):
            name = f"of_{'a_prompt' if other == 'prompt' else other}_{clock}"
            result[name] = medians["decisions"][clock] / medians[other][clock]
    return result


class Caller:
    """A client of the server, with a state and questions."""

    def __init__(self, url: str, key: str, text: str, number: int) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=3600)
        self._text = text
        self._questions = instructions(number)
        self._server = server_of(url)

    def decide(self) -> int:
        """Ask all questions by one call. Returns the computed tokens."""
        questions = choices(self._questions)
        answer = self._post("/v1/systemone", {"state": self._text, "questions": questions})
        return int(answer["usage"]["input_tokens"])

    def measured(self, tokens: int, ids: Sequence[int], rounds: int) -> dict[str, list[Spent]]:
        """The times of all kinds of calls, in turns."""
        prompt = [*ids] * (tokens // len(ids) + 1)
        calls: dict[str, Callable[[], object]] = {
            "decisions": self.decide,
            "prompt": lambda: self._complete(prompt[:tokens]),
            "chats": self._chats,
        }
        found: dict[str, list[Spent]] = {kind: [] for kind in calls}
        for _ in range(rounds):
            for kind, call in calls.items():
                found[kind].append(self._timed(call))
        return found

    def _timed(self, call: Callable[[], object]) -> Spent:
        begun = processor_seconds(self._server)
        start = time.perf_counter()
        call()
        return Spent(time.perf_counter() - start, processor_seconds(self._server) - begun)

    def _complete(self, prompt: Sequence[int]) -> Any:
        return self._post("/v1/completions", {"prompt": prompt, "max_tokens": 1})

    def _chats(self) -> None:
        def chat(question: str) -> Any:
            message = {"role": "user", "content": f"{self._text}\n\n{question}"}
            return self._post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})

        with ThreadPoolExecutor(len(self._questions)) as threads:
            list(threads.map(chat, self._questions))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json={"model": NAME, **body})
        answer.raise_for_status()
        return answer.json()


def processor_seconds(server: psutil.Process) -> float:
    """Seconds that a process and its children have computed so far."""
    times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
    return float(sum([each.user + each.system for each in times]))


def server_of(url: str) -> psutil.Process:
    """The process that listens at an address of this machine."""
    port = int(url.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        listening = [
            each.laddr.port for each in process.net_connections() if each.status == "LISTEN"
        ]
        if port in listening:
            return process
    raise RuntimeError(f"no child of this process listens at {port}")
