"""Measures the MLPs of one layer on this CPU: experts against dense MLPs.

    python -m lab.measured.experts [--repeats 20]

Prints tokens per second of processor time for the experts' loop, for a dense MLP with the width of a token's experts,
and for all experts on every token. The least time of all repetitions counts. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.expert_mlp import ExpertKernels, expert_mlp
from orca_jax.kernels.expert_mlp.parts import one_expert

EMBED = 512
WIDTH = 768
EXPERTS = 16
PER_TOKEN = 2
TOKENS = (1, 8, 32, 128, 512)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The hidden vector of an expert."""
    return jax.nn.silu(gate) * up


def programs(tokens: int) -> Mapping[str, Callable[[], jax.Array]]:
    """The compiled forms, by name. Each runs on the same tokens."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(scale=0.02, size=shape), jnp.float32)

    x = normal(tokens, EMBED)
    weights = jnp.full((tokens, PER_TOKEN), 1 / PER_TOKEN)
    chosen = jnp.asarray([draw.permutation(EXPERTS)[:PER_TOKEN] for _ in range(tokens)], jnp.int32)
    stacks = ExpertKernels(
        normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, EMBED, WIDTH), normal(EXPERTS, WIDTH, EMBED)
    )
    active = PER_TOKEN * WIDTH
    dense = ExpertKernels(normal(EMBED, active), normal(EMBED, active), normal(active, EMBED))

    def experts(name: str) -> Callable[[], jax.Array]:
        run = jax.jit(lambda *args: expert_mlp(*args, activation=gated, implementation=name))
        return lambda: run(x, chosen, weights, stacks)

    one = jax.jit(lambda x, kernels: one_expert(x, kernels, gated))
    return {
        "experts": experts("blocks"),
        "dense, of equal active width": lambda: one(x, dense),
        "all": experts("dense"),
    }


def processor_seconds(run: Callable[[], jax.Array]) -> float:
    """The time of one run on all cores together. Other processes do not count."""
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rates: dict[int, dict[str, float]] = {}
    for tokens in TOKENS:
        forms = programs(tokens)
        for run in forms.values():
            jax.block_until_ready(run())
        rates[tokens] = {}
        for name, run in forms.items():
            least = min(processor_seconds(run) for _ in range(args.repeats))
            rates[tokens][name] = round(tokens / least)
        print(
            f"{tokens:4d} tokens: "
            + ", ".join(f"{name} {rate}/s" for name, rate in rates[tokens].items())
        )
    shape = {"embed": EMBED, "width": WIDTH, "experts": EXPERTS, "per_token": PER_TOKEN}
    print(json.dumps({**shape, "tokens_per_processor_second": rates}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
