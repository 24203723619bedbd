"""Passes of both sides over one workload, in alternation."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.peers.environment import Environment
from lab.peers.inputs import Inputs
from lab.peers.side import Keep, Side
from orca_jax.values.errors import OrcaError

RATE = "output_tokens_per_s"


@dataclass(frozen=True)
class Pairs:
    """The passes of one setting, in output tokens per second, round by round."""

    own: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours to the peer's, round by round."""
        return [own / peer for own, peer in zip(self.own, self.peer, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return medians and the range of the ratios, with all passes."""
        ratios = self.ratios
        return {
            "own_tokens_per_s": statistics.median(self.own),
            "peer_tokens_per_s": statistics.median(self.peer),
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "own_passes": self.own,
            "peer_passes": self.peer,
        }


def alternate(own: Side, peer: Side, rounds: int) -> Pairs:
    """Run the passes of both sides, each first in every other round."""
    pairs = Pairs([], [])
    for number in range(rounds):
        order = [(own, pairs.own), (peer, pairs.peer)]
        for side, passes in order if number % 2 == 0 else reversed(order):
            passes.append(side.run_pass()[RATE])
    return pairs


def run_offline(
    args: argparse.Namespace,
    inputs: Inputs,
    environments: Sequence[Environment],
    keep: Keep,
) -> None:
    """Run all pairs; `keep` takes the results of each setting.

    Ours stays loaded while the peers of a setting take turns. A peer that fails is reported, and its other ways of
    running are left out.
    """
    failed: set[str] = set()
    for dtype in args.dtype:
        for threads in args.threads:
            with Side("orca-jax", own_command(args, inputs, dtype, threads), args.timeout) as own:
                keep({"sides": {"own": own.about()}})
                for environment in environments:
                    for mode in args.modes or environment.peer.modes:
                        if environment.name in failed or mode not in environment.peer.modes:
                            continue
                        name = f"{environment.name}/{dtype}/{mode}/{threads}"
                        try:
                            keep(_pairs(args, inputs, environment, own, name))
                        except OrcaError as error:
                            if own.has_ended:
                                raise
                            failed.add(environment.name)
                            keep({"unavailable": {environment.name: str(error)}})


def _pairs(
    args: argparse.Namespace, inputs: Inputs, environment: Environment, own: Side, name: str
) -> dict[str, Any]:
    _, dtype, mode, threads = name.split("/")
    command = [
        *environment.command(environment.peer.program, int(threads)),
        *("--on-request", "--workload", str(inputs.workload), "--model", str(inputs.model)),
        *("--mode", mode, "--dtype", dtype, "--threads", threads),
        *("--max-num-seqs", str(args.peer_max_num_seqs or environment.peer.max_num_seqs)),
    ]
    with Side(f"{environment.name} ({mode})", command, args.timeout) as peer:
        about = peer.about()
        pairs = alternate(own, peer, args.rounds)
    print(f"{name}: ratios {', '.join(f'{ratio:.2f}' for ratio in pairs.ratios)}", file=sys.stderr)
    return {"settings": {name: pairs.figures()}, "sides": {f"{environment.name}/{mode}": about}}


def own_command(args: argparse.Namespace, inputs: Inputs, dtype: str, threads: int) -> list[str]:
    """Return the command of our side."""
    return [
        *(sys.executable, "-m", "lab.peers.own", "--workload", str(inputs.workload)),
        *(
            "--model",
            str(inputs.model),
            "--tokenizer",
            "byte",
            "--dtype",
            dtype,
            "--threads",
            str(threads),
        ),
        *("--max-num-seqs", str(args.max_num_seqs), "--seed", str(args.seed), *args.engine_flags),
    ]
