"""The loads of the shelf: equal requests for all policies."""

import random
from collections.abc import Mapping
from pathlib import Path

from lab.paper.fits import FITTED
from lab.paper.gpt import LONGEST, MODELS
from lab.shelf.virtual import Call, Devices
from orca_jax.tools.bench.workload.generate import make_workload
from orca_jax.tools.plan.accelerators import ACCELERATORS

MODEL, DEVICE = "13B", "a100-40"
DEVICES = Devices(
    MODELS[MODEL].cost(ACCELERATORS[DEVICE], FITTED.efficiencies[MODEL]),
    MODELS[MODEL].num_slots(ACCELERATORS[DEVICE]) // 16,
    max_batch=64,
    longest=LONGEST,
    reuses_prefixes=True,
)
"""A model of the ORCA paper on one simulated device, with fitted shares of its published rates."""
TRACES: Mapping[str, tuple[str, str]] = {
    "azure": ("azure", "AzureLLMInferenceTrace_conv.csv"),
    "mooncake": ("mooncake", "mooncake_conversation_trace.jsonl"),
}
"""The format and the file of each public trace."""
SCALES = {"azure": 0.5, "mooncake": 0.0625}
"""Lengths are multiplied by these, so that most requests fit into the context of the model."""
GAP = 0.5  # seconds between an answer and the next call of its program


def load(name: str, rate: float, count: int, seed: int, traces: Path | None = None) -> list[Call]:
    """Requests at a rate, or all at once for `inf`; a fourth of them are from client B, the others from A.

    Args:
        name: "orca" for the lengths of the ORCA paper, "agents", or a key of `TRACES`.
        rate: requests per second; of agents, calls per second that programs bring with them.
        count: requests.
        seed: of the arrivals, clients, and random lengths.
        traces: directory with the files of `TRACES`.
    """
    if name == "agents":
        return agents(rate, count, seed)
    dice = random.Random(f"shelf-{name}-{seed}")
    kind, file = TRACES.get(name, ("orca", ""))
    workload = make_workload(
        kind, num_requests=count, vocab_size=32_000, seed=seed, rate=None, max_model_len=LONGEST,
        data=None if traces is None or not file else str(traces / file), length_scale=SCALES.get(name, 1.0),
    )  # fmt: skip
    most = max([each.num_output for each in workload])
    calls = list[Call]()
    at = 0.0
    for each in workload:
        at += dice.expovariate(1.0) / rate
        bound = min(most, LONGEST - len(each.prompt_ids))
        client = "B" if dice.random() < 0.25 else "A"
        calls.append(
            Call(at, len(each.prompt_ids), each.num_output, bound, client, prompt=each.prompt_ids)
        )
    return calls


def agents(rate: float, count: int, seed: int) -> list[Call]:
    """Programs of 1 to 12 calls in a row, geometric with a mean near 4; prompts grow by each answer. The tenant is the
    program.
    """
    dice = random.Random(f"agents-{seed}")
    calls = list[Call]()
    at = 0.0
    while len(calls) < count:
        num_calls = next(n for n in range(1, 13) if n == 12 or dice.random() < 0.25)
        at += dice.expovariate(1.0) / rate * num_calls
        prompt = dice.randint(64, 256)
        name = f"program-{len(calls)}"
        for number in range(min(num_calls, count - len(calls))):
            output = min(256, 1 + int(dice.expovariate(1 / 48)))
            after = len(calls) - 1 if number else None
            calls.append(Call(GAP if number else at, prompt, output, 256, tenant=name, after=after))
            prompt = min(1024, prompt + output + dice.randint(8, 64))
    return calls
