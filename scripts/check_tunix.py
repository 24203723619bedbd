"""Checks the rollout engine for Tunix with Tunix itself.

    python scripts/check_tunix.py

Needs google-tunix and this package in an environment of its own: `python -m venv ENV && ENV/bin/pip install
google-tunix .`. Tunix reads a reference model. The engine samples it with new parameters, and its log probabilities are
compared with those of Tunix. The base class is compared with the one recorded for the tests. Then Tunix's learners
train tiny models (`tunix_learners.py`).
"""

import importlib
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from orca_jax.llm.tunix_rollout import BASE, orca_rollout  # noqa: E402
from record_tunix import REFERENCE, read_model  # noqa: E402
from tests.rollouts import tunix_contract as recorded  # noqa: E402
from tunix_learners import check_learners  # noqa: E402

NAME = "qwen2-tied"
TOLERANCE = 2e-5
PAD, EOS = 96, 95  # Tunix takes each PAD for padding, also a generated one


class IdTokenizer:
    """Texts are numbers with blanks between them."""

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def check_contract(base: Any) -> None:
    """Compare the base class with the recorded one."""
    assert recorded.contract_of(base.BaseRollout) == recorded.CONTRACT, recorded.contract_of(
        base.BaseRollout
    )
    assert list(base.RolloutOutput.__dataclass_fields__) == recorded.OUTPUT
    config = base.RolloutConfig()
    assert {name: getattr(config, name) for name in recorded.CONFIG} == recorded.CONFIG
    print("the contract is the recorded one")


def check_rollouts(base: Any) -> None:
    """Compare texts and log probabilities with Tunix, before and after an update of the parameters."""
    common = importlib.import_module("tunix.rl.common")
    model = read_model(NAME)
    engine = orca_rollout(
        str(REFERENCE / NAME),
        tokenizer="byte",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    rollout = engine(rollout_actor=model, tokenizer=IdTokenizer(), mesh=None, rollout_config=None)
    config = base.RolloutConfig(
        max_tokens_to_generate=6, temperature=0.7, max_prompt_length=8, seed=3, return_logprobs=True
    )
    prompts = ["5 6 7 8", "9 10"]
    before: Any = None
    for scale in (1.0, 1.3):
        state = jax.tree.map(partial(jnp.multiply, scale), nnx.state(model, nnx.Param))
        nnx.update(model, state)
        # as `RLCluster.sync_weights` does
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            rollout.update_params(state, (nnx.Param,))
        output = rollout.generate(prompts, config)
        width = max(map(len, output.tokens))
        assert not any(PAD in each for each in output.tokens), "choose another seed"
        completions = np.array(
            [[*each, *[PAD] * (width - len(each))] for each in output.tokens], np.int32
        )
        graph, params = nnx.split(model)
        given = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)
        score = partial(common.compute_per_token_logps, graph, params, pad_id=PAD, eos_id=EOS)
        theirs = np.asarray(score(*given))
        drawn = np.asarray(score(*given, temperature=config.temperature))
        ours = np.asarray(rollout.get_per_token_logps(*given))
        for row, tokens in enumerate(output.tokens):
            size = len(tokens)
            for found, wanted in (
                (output.logprobs[row], drawn[row]),
                (ours[row, :size], theirs[row]),
            ):
                error = np.abs(found - wanted[:size]).max() / np.abs(wanted).max()
                assert error <= TOLERANCE, (
                    f"they differ by {error:.1e}: {found} and {wanted}, {tokens}"
                )
        assert before is None or not np.array_equal(before, theirs), "the update changed nothing"
        before = theirs
    print("log probabilities are those of Tunix, before and after an update")


def main() -> None:
    """Run all checks."""
    base = importlib.import_module(BASE)
    check_contract(base)
    check_rollouts(base)
    check_learners()
    print("Tunix's learners train on rollouts of the engine")


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except AssertionError:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # threads of Tunix's agents wait for prompts, and would keep the process
