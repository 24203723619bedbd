"""Calls to two servers in turns: their times, and the changes of their probabilities."""

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from lab.decisions.work import Spent, processor_seconds, server_of
from orca_jax.values.errors import OrcaError

OURS = "orca-jax"
THEIRS = "vllm"

type Body = Mapping[str, Any]
type Answers = Mapping[str, Mapping[str, float]]
"""The probabilities of the options of each question."""


class Change(NamedTuple):
    """How far answers are from those of the first call: the largest distance, and how many questions differ."""

    largest: float
    questions: int


class Bodies(NamedTuple):
    """The measured call, and the calls in its company, without salts."""

    asked: Body
    others: Sequence[Body]

    def call(self, salt: str | None = None) -> Body:
        """The measured call, by default with a new salt."""
        return {**self.asked, "cache_salt": salt or secrets.token_hex(16)}

    def company(self) -> list[Body]:
        """The other calls, each with a new salt."""
        return [{**each, "cache_salt": secrets.token_hex(16)} for each in self.others]


class DecisionClient:
    """A client of one server."""

    def __init__(self, post: Callable[[Body], Any], seconds: Callable[[], float]) -> None:
        """Keep the way to the server.

        Args:
            post: answers a body of `/v1/systemone`.
            seconds: processor seconds of the server so far.
        """
        self._post = post
        self._seconds = seconds

    def decide(self, body: Body) -> Answers:
        """The probabilities of a call."""
        answers = self._post(body)["answers"]
        return {key: one["probabilities"] for key, one in answers.items()}

    def timed(self, body: Body) -> tuple[Spent, Answers]:
        """The times of a call, and its probabilities."""
        begun = self._seconds()
        start = time.perf_counter()
        answers = self.decide(body)
        return Spent(time.perf_counter() - start, self._seconds() - begun), answers

    def in_company(self, body: Body, company: Sequence[Body]) -> Answers:
        """The probabilities of a call that is sent in the middle of others."""
        half = len(company) // 2
        bodies = [*company[:half], body, *company[half:]]
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(self.decide, bodies))[half]


def client(url: str) -> DecisionClient:
    """The client of the server at an address of this machine. Its calls raise OrcaError if they are refused."""
    http = httpx.Client(base_url=url, timeout=3600, trust_env=False)
    server = server_of(url)

    def post(body: Body) -> Any:
        answer = http.post("/v1/systemone", json=body)
        if answer.is_error:
            raise OrcaError(f"{url} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    return DecisionClient(post, lambda: processor_seconds(server))


def measured(
    clients: Mapping[str, DecisionClient], bodies: Bodies, rounds: int, pause: float
) -> dict[str, Any]:
    """The times of calls in turns, their ratios, and the changes of probabilities."""
    for one in clients.values():
        one.decide(bodies.call())
    found: dict[str, list[tuple[Spent, Answers]]] = {name: [] for name in clients}
    for name in itertools.islice(turns([*clients]), rounds * len(clients)):
        time.sleep(pause)
        found[name].append(clients[name].timed(bodies.call()))
    first = {name: each[0][1] for name, each in found.items()}
    changes = {}
    for name, one in clients.items():
        kinds = _revisited(one, bodies, rounds)
        kinds["again"] += [answers for _, answers in found[name][1:]]
        changes[name] = changed(first[name], kinds)
    times = {}
    for name, each in found.items():
        times[name] = [spent for spent, _ in each]
    apart = change(first[OURS], [first[THEIRS]]).largest
    return {**compared(times), "changed": changes, "apart": apart}


def turns(names: Sequence[str]) -> Iterator[str]:
    """The names in turns, the last one first in every other round."""
    return itertools.cycle([*names, *reversed(names)])


def _revisited(one: DecisionClient, bodies: Bodies, rounds: int) -> dict[str, list[Answers]]:
    """Answers to the call alone again, from the cache, and in company."""
    salt = secrets.token_hex(16)
    again = one.decide(bodies.call(salt))
    cached = one.decide(bodies.call(salt))
    company = [one.in_company(bodies.call(), bodies.company()) for _ in range(rounds)]
    return {"again": [again], "cached": [cached], "company": company}


def changed(first: Answers, kinds: Mapping[str, Sequence[Answers]]) -> dict[str, Any]:
    """How far the answers of each kind of call are from the first ones."""
    return {kind: change(first, each)._asdict() for kind, each in kinds.items()}


def change(first: Answers, others: Sequence[Answers]) -> Change:
    """How far other answers are from the first ones."""
    largest = 0.0
    moved = set[str]()
    for answers in others:
        for key, options in first.items():
            distance = max([abs(answers[key][name] - value) for name, value in options.items()])
            largest = max(largest, distance)
            if distance:
                moved.add(key)
    return Change(largest, len(moved))


def compared(times: Mapping[str, Sequence[Spent]]) -> dict[str, Any]:
    """The medians of both servers, and the medians and ranges of vLLM's times over ours in each round."""
    seconds: dict[str, dict[str, float]] = {OURS: {}, THEIRS: {}}
    ratio = {}
    ranges = {}
    for clock in Spent._fields:
        ours = [getattr(spent, clock) for spent in times[OURS]]
        theirs = [getattr(spent, clock) for spent in times[THEIRS]]
        parts = [second / first for first, second in zip(ours, theirs, strict=True)]
        seconds[OURS][clock] = statistics.median(ours)
        seconds[THEIRS][clock] = statistics.median(theirs)
        ratio[clock] = statistics.median(parts)
        ranges[clock] = [min(parts), max(parts)]
    return {"seconds": seconds, "ratio": ratio, "range": ranges}
