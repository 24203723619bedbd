"""VTC's bound on two clients that always have requests waiting (Sheng et al., arXiv 2401.00588, Theorem 4.4).

Client A sends short prompts with long answers, client B long prompts with short answers; both send more than half of
what the engine serves, and A many more than B. The service of a client is w_p for each prompt token, counted when its
request is admitted, and w_q for each generated token, w_p = 1 and w_q = 2 as in the paper's experiments. In each
interval in which both wait, their services differ by at most `2 * max(w_p * L_input, w_q * M)`, with the longest prompt
L_input and the most tokens M that fit into memory. First come, first served breaks the bound. The paper shows this with
Llama-2-7B on an A10G GPU; here the theorem is checked, and no time is compared.
"""

import random
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

from lab.paper.effort import Effort
from lab.policies.sarathi import Sarathi
from lab.policies.vtc import VirtualTokenCounter
from lab.reproduce.rows import Row
from lab.shelf.virtual import Call, Devices, Outcome, on_protocol, serve_calls
from orca_jax.policy import Policy
from orca_jax.sim.cost import LinearCost

W_P, W_Q = 1, 2
CLIENTS = {"A": (16, 64, 12.0), "B": (128, 16, 4.0)}
"""Prompt tokens, generated tokens, and requests per second."""
DEVICES = Devices(LinearCost(0.02, 0.0005, 0.0), 96, max_batch=16, token_budget=256, longest=256)
BOUND = 2 * max(W_P * 128, W_Q * DEVICES.num_pages * DEVICES.page_size)


def load(count: int, seed: int) -> list[Call]:
    """The requests of both clients, by arrival; as many seconds of each."""
    dice = random.Random(f"vtc-{seed}")
    calls = list[Call]()
    seconds = count / sum([rate for _, _, rate in CLIENTS.values()])
    for client, (num_prompt, num_generated, rate) in CLIENTS.items():
        arrivals = accumulate(dice.expovariate(rate) for _ in range(int(rate * seconds)))
        calls += [Call(at, num_prompt, num_generated, tenant=client) for at in arrivals]
    return sorted(calls)


def gap(calls: Sequence[Call], outcome: Outcome) -> float:
    """The largest change of the difference of both services while both clients have requests waiting.

    A prompt is counted with the first token, an iteration or a few after its admission.
    """
    # time, client, service, requests that begin to wait
    events = list[tuple[float, str, float, int]]()
    for call, service in zip(calls, outcome.services, strict=True):
        events.append((service.arrival, call.tenant, 0.0, 1))
        events.append((service.tokens[0], call.tenant, float(W_P * call.num_prompt), -1))
        events += [(at, call.tenant, float(W_Q), 0) for at in service.tokens]
    waiting = {"A": 0, "B": 0}
    difference = 0.0
    worst = 0.0
    least = most = None
    for _, client, amount, change in sorted(events):
        waiting[client] += change
        difference += amount if client == "A" else -amount
        if not all(waiting.values()):
            least = most = None
            continue
        least = difference if least is None else min(least, difference)
        most = difference if most is None else max(most, difference)
        worst = max(worst, most - least)
    return worst


def measure(name: str, count: int, seed: int) -> float:
    """The largest gap under a policy."""
    calls = load(count, seed)
    policy: Policy = VirtualTokenCounter(W_P, W_Q) if name == "vtc" else Sarathi()
    return gap(calls, serve_calls(lambda devices: on_protocol(policy, devices), calls, DEVICES))


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The largest gaps of VTC and of first come, first served on the same requests."""
    cases = product(("vtc", "fcfs"), range(3))
    runs = [(name, effort.requests, seed) for name, seed in cases]
    gaps = effort.map(measure, *zip(*runs, strict=True))
    vtc = max(gaps[:3])
    fcfs = min(gaps[3:])
    text = "largest difference of the services of two waiting clients, in weighted tokens: "
    return {"bound": BOUND, "vtc": gaps[:3], "fcfs": gaps[3:]}, [
        Row("vtc.bound", f"{text}VTC, worst of 3", vtc, f"<= {BOUND}", holds=vtc <= BOUND),
        Row("vtc.fcfs", f"{text}FCFS, best of 3", fcfs, f"> {BOUND}", holds=fcfs > BOUND),
    ]
