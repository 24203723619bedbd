"""Algorithm 1 of the paper (section 4.2), written from its text alone: the oracle of `test_algorithm_1.py`.

It shares no code with the package. The numbers are the paper's lines. Two things are added: an empty batch is not
scheduled, and a `World` decides when requests arrive and when the wait of line 10 ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass
class Req:
    """A request. `max_tokens` counts prompt and generated tokens; a request with an early end generates fewer."""

    name: str
    num_prompt: int
    max_tokens: int
    num_generated: int
    state: str = "INITIATION"
    done: int = 0  # generated tokens


class World:
    """The same arrivals and the same order of arrivals and results for whoever asks in the same order."""

    def __init__(self, requests: list[Req], seed: int) -> None:
        self.coming = list(requests)
        self.dice = Random(seed)
        self.burst = self.dice.choice([0.1, 0.4, 0.8])

    def arrive(self, least: int = 0) -> list[Req]:
        """The requests that arrive now, and at least this many of them if so many are left."""
        count = least
        while self.dice.random() < self.burst:
            count += 1
        arrived, self.coming = self.coming[:count], self.coming[count:]
        return arrived

    def interrupts(self) -> bool:
        """True if a request arrives before the awaited result."""
        return bool(self.coming) and self.dice.random() < 0.5


def algorithm_1(world: World, n_workers: int, max_bs: int, n_slots: int) -> Iterator[str]:
    """Yield each scheduled batch, as `A5 B1`, and each return, as `> A, 7`: the ended requests, and n_rsrv."""
    n_scheduled = 0  # 1
    n_rsrv = 0  # 2
    pool = world.arrive(1)
    scheduled: list[list[Req]] = []
    while pool or world.coming:  # 3
        batch, n_rsrv = select(pool, n_rsrv, max_bs, n_slots)  # 4
        if batch:
            yield " ".join(
                f"{req.name}{req.num_prompt if req.state == 'INITIATION' else 1}" for req in batch
            )
            scheduled.append(batch)  # 5
            for req in batch:  # 6
                req.state = "RUNNING"  # 7
            n_scheduled = n_scheduled + 1  # 8
        elif n_scheduled == 0:
            assert not pool, "no request may run, and no result is awaited"
            pool += world.arrive(1)
            continue
        elif world.interrupts():
            pool += world.arrive(1)
            continue
        if n_scheduled == n_workers or not batch:  # 9
            ended = []
            for req in scheduled.pop(0):  # 10, 11
                req.state = "INCREMENT"  # 12
                req.done += 1
                if req.done == req.num_generated:  # 13
                    n_rsrv = n_rsrv - req.max_tokens  # 14
                    ended.append(req.name)
                    pool.remove(req)
            n_scheduled = n_scheduled - 1  # 15
            yield f"> {''.join(ended)}, {n_rsrv}"
            pool += world.arrive() if pool else world.arrive(1)


def select(pool: list[Req], n_rsrv: int, max_bs: int, n_slots: int) -> tuple[list[Req], int]:  # 17
    """`Select` of Algorithm 1. The pool is in order of arrival (20)."""
    batch: list[Req] = []  # 18
    for req in [req for req in pool if req.state != "RUNNING"]:  # 19, 21
        if len(batch) == max_bs:  # 22
            break
        if req.state == "INITIATION":  # 23
            new_n_rsrv = n_rsrv + req.max_tokens  # 24
            if new_n_rsrv > n_slots:  # 25
                break
            n_rsrv = new_n_rsrv  # 26
        batch.append(req)  # 27
    return batch, n_rsrv  # 28
