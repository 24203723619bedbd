"""The rollout engine for Tunix: on a recorded contract, and with Tunix itself in an environment of its own."""

import inspect
import subprocess
import sys
import types
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax import LLM
from orca_jax.llm import tunix_rollout
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import SamplingParams
from tests.rollouts import tunix_contract as contract
from tests.sim.oracle import toy_generate, toy_score

ROOT = Path(__file__).parents[2]


class FakeTokenizer:
    """Letters as their bytes, with the methods of Tunix's adapter."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return 256

    def pad_id(self) -> int:
        return 0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The rollout on the toy, over the recorded base class."""
    module = types.ModuleType(tunix_rollout.BASE)
    vars(module).update(BaseRollout=contract.BaseRollout, RolloutOutput=contract.RolloutOutput)
    monkeypatch.setitem(sys.modules, tunix_rollout.BASE, module)
    tunix_rollout.rollout_class.cache_clear()
    made = []

    def build(actor: Any = None, **others: Any) -> Any:
        settings = {"model": "preset:toy", "logprobs_mode": "raw_logprobs", "max_model_len": 128}
        engine = tunix_rollout.orca_rollout(**{**settings, **others})
        assert issubclass(engine.func, contract.BaseRollout)
        made.append(engine(**{**dict.fromkeys(contract.CONSTRUCTOR), "rollout_actor": actor}))
        return made[-1]

    yield build
    for rollout in made:
        rollout.llm.close()
    tunix_rollout.rollout_class.cache_clear()


def test_the_methods_are_those_of_the_contract() -> None:
    assert contract.contract_of(contract.BaseRollout) == contract.CONTRACT
    for name, wanted in contract.CONTRACT.items():
        found = list(inspect.signature(getattr(tunix_rollout._Rollout, name)).parameters)[1:]
        assert found[: len(wanted)] == wanted
    found = list(inspect.signature(tunix_rollout._Rollout).parameters)
    assert set(contract.CONSTRUCTOR) < set(found)


def test_outputs(make: Any) -> None:
    config = contract.RolloutConfig(
        max_tokens_to_generate=6, temperature=0, max_prompt_length=4, return_logprobs=True
    )
    rollout = make()
    rollout._tokenizer = FakeTokenizer()
    output = rollout.generate(["ab", "c"], config)
    params = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(256,))
    for index, ids in enumerate(([2, 97, 98], [2, 99])):
        tokens = toy_generate(ids, params, vocab_size=257)
        assert output.tokens[index].tolist() == tokens and output.text[index] == " ".join(
            map(str, tokens)
        )
        assert output.left_padded_prompt_tokens[index].tolist() == [0] * (4 - len(ids)) + ids
        scores = [one.logprob for one in toy_score(ids + tokens, 0, vocab_size=257)][-len(tokens) :]
        np.testing.assert_allclose(output.logprobs[index], scores, rtol=1e-6)
    assert rollout.generate(["ab"], contract.RolloutConfig()).logprobs is None
    (alone,) = rollout.generate("ab", config).tokens
    assert alone.tolist() == output.tokens[0].tolist(), "agents give the text itself"
    with pytest.raises(RequestError, match="max_prompt_length is 4: raise it"):
        rollout.generate(["abcdef"], config)
    with pytest.raises(RequestError, match="no argument images"):
        rollout.generate(["a"], config, images=1)


def test_equal_prompts_get_seeds_of_their_own(make: Any) -> None:
    rollout = make()
    config = contract.RolloutConfig(
        max_tokens_to_generate=6, temperature=1.0, seed=jax.random.PRNGKey(3)
    )
    first, second = rollout.generate(["ab", "ab"], config).tokens
    assert first.tolist() != second.tolist()
    assert rollout.generate(["ab", "ab"], config).tokens[1].tolist() == second.tolist()


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5)])
def test_filters_are_refused_unless_they_are_wanted(make: Any, name: str, value: float) -> None:
    config = contract.RolloutConfig(max_tokens_to_generate=2, **{name: value})
    with pytest.raises(RequestError, match=f"{name} {value} leaves tokens out") as caught:
        make().generate(["ab"], config)
    assert caught.value.param == name
    assert len(make(filters=True).generate(["ab"], config).tokens[0]) == 2


@pytest.mark.parametrize("top_k", [0, -1])
def test_values_that_filter_nothing_are_taken(make: Any, top_k: int) -> None:
    config = contract.RolloutConfig(max_tokens_to_generate=2, top_k=top_k)
    assert len(make().generate(["ab"], config).tokens[0]) == 2


@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
def test_log_probabilities_are_those_of_the_sampled_distribution(make: Any) -> None:
    rollout = make(model="demo", logprobs_mode="processed_logprobs", max_model_len=64)
    config = contract.RolloutConfig(
        max_tokens_to_generate=8, temperature=1.3, return_logprobs=True, seed=np.array([3])
    )
    output = rollout.generate(["once upon"], config)
    prompt = rollout.llm.tokenizer.encode("once upon", True)
    drawn = output.tokens[0]
    params = SamplingParams(max_tokens=1, temperature=1.3, prompt_logprobs=0)
    (scored,) = rollout.llm.generate([[*prompt, *drawn.tolist()]], params, use_tqdm=False)
    known = scored.prompt_logprobs[len(prompt) :]
    pairs = zip(drawn.tolist(), known, strict=True)
    wanted = [entry[token].logprob for token, entry in pairs]
    np.testing.assert_allclose(output.logprobs[0], wanted, atol=2e-5)
    own = rollout.get_per_token_logps(np.array([prompt]), np.array([drawn]))
    assert np.abs(own[0] - output.logprobs[0]).max() > 1e-2, "those without a temperature"


def test_scores_of_padded_tokens(make: Any) -> None:
    rollout = make()
    rollout._tokenizer = FakeTokenizer()
    prompts, completions = (
        np.array([[0, 0, 5, 6], [1, 2, 3, 4]]),
        np.array([[7, 8, 0], [9, 10, 11]]),
    )
    scores = rollout.get_per_token_logps(prompts, completions)
    contexts = ([5, 6, 7, 8], [1, 2, 3, 4, 9, 10, 11])
    wanted = [[one.logprob for one in toy_score(ids, 0, vocab_size=257)] for ids in contexts]
    np.testing.assert_allclose(scores, [[*wanted[0][-2:], 0], wanted[1][-3:]], rtol=1e-6)
    masked = rollout.get_per_token_logps(prompts, completions, np.array([[1, 0, 0], [1, 1, 1]]))
    np.testing.assert_allclose(masked[0], [wanted[0][-2], 0, 0], rtol=1e-6)


class Actor(nnx.Module):
    """A model of Tunix with an adapter of rank 3."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((2, 2)))
        self.w_lora_a = nnx.LoRAParam(jnp.ones((2, 3)))
        self.w_lora_b = nnx.LoRAParam(jnp.ones((3, 2)))


def test_updates(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, seen = make(), list[Any]()
    monkeypatch.setattr(rollout.llm, "update_params", lambda tree, version: seen.append(tree))
    rollout.update_params({"w": 1}, (nnx.Param,))
    assert seen == [{"w": 1}] and rollout.model() is None
    assert (rollout.pad_id(), rollout.eos_id()) == (256, 256)


def test_updates_of_adapters_leave_the_weights(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setattr(LLM, "update_params", lambda _, tree, version: seen.append(tree))
    engine = partial(tunix_rollout.rollout_class(), model="preset:toy", filters=False, settings={})
    with pytest.raises(ConfigError, match="give orca_rollout the lora_alpha"):
        engine(rollout_actor=Actor(), lora_alpha=None)
    rollout = make(actor=Actor(), lora_alpha=6.0, max_model_len=128)
    assert [sorted(tree) for tree in seen] == [["w"]]
    config = contract.RolloutConfig(max_tokens_to_generate=6, temperature=0)
    first = rollout.generate(["ab"], config).tokens[0].tolist()
    state = jax.tree.map(lambda leaf: 2 * leaf, nnx.state(Actor(), nnx.LoRAParam))
    rollout.update_params(state, (nnx.LoRAParam,))
    assert rollout.generate(["ab"], config).tokens[0].tolist() != first
    assert len(seen) == 1 and rollout.llm.engine.weight_version == 2
    assert rollout.llm.timeline_header.config.max_lora_rank == 3


def test_without_tunix_the_error_says_so() -> None:
    tunix_rollout.rollout_class.cache_clear()
    with pytest.raises(ConfigError, match="pip install google-tunix"):
        tunix_rollout.orca_rollout("preset:toy")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_with_tunix_itself(tmp_path: Path) -> None:
    """Needs the network: an environment with google-tunix is made."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "google-tunix", str(ROOT)], check=True)
    done = subprocess.run(
        [python, ROOT / "scripts" / "check_tunix.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the contract is the recorded one" in done.stdout
    assert "learners train on rollouts of the engine" in done.stdout
