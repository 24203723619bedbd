"""Trains tiny models with Tunix's learners on rollouts of this engine, for `check_tunix.py`.

`GRPOLearner` runs on rollouts of the engine, and again on Tunix's own `vanilla` rollouts, which repeat the same tokens.
With plain gradient descent the parameters afterwards show the gradients. The agentic learner calls the engine from many
threads; an actor with adapters syncs these alone.
"""

import importlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from orca_jax.llm.tunix_rollout import orca_rollout

EOS = 256
ROWS = 64
THREADS = 64
GENERATIONS = 8
ALPHA = 8.0
RANK = 4
CALLS = 8  # of each thread
LONG = 96  # tokens of agents, so that their start counts little
TOLERANCE = 1e-5
LEAST_BATCH = 0.8  # of the smaller of threads and rows
PROMPTS = [f"count to {number}: " for number in range(16)]
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": EOS + 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


SIZES = {
    "embed_dim": SHAPE["hidden_size"],
    "num_heads": SHAPE["num_attention_heads"],
    "num_kv_heads": SHAPE["num_key_value_heads"],
    "head_dim": SHAPE["head_dim"],
}
"""The same sizes, as Tunix names them."""


class ByteTokenizer:
    """Letters as their bytes; the end token is the padding, too."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(token for token in ids if token < EOS).decode(errors="replace")

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return EOS


class PlainChat:
    """The last message alone, as a parser of Tunix's agents."""

    def parse(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[-1]["content"]


@dataclass
class Recorded:
    """The outputs of a rollout, in the order of their calls."""

    outputs: list[Any] = field(default_factory=list)

    def keep(self, engine: Any) -> Any:
        """A class of the engine that keeps its outputs."""
        outputs = self.outputs
        base: Any = engine.func

        class Kept(base):
            def generate(self, prompts: Any, rollout_config: Any, **others: Any) -> Any:
                outputs.append(super().generate(prompts, rollout_config, **others))
                return outputs[-1]

        return type(engine)(Kept, **engine.keywords)

    def repeat(self) -> type[Any]:
        """A class of Tunix's own rollout that gives these outputs."""
        vanilla: Any = importlib.import_module("tunix.rl.rollout.vanilla_rollout").VanillaRollout
        cache = importlib.import_module("tunix.rl.rollout.base_rollout").CacheConfig
        left: Iterator[Any] = iter(self.outputs)

        class Repeated(vanilla):
            def __init__(self, rollout_actor: Any, tokenizer: Any, **_: Any) -> None:
                shape = rollout_actor.config
                sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
                super().__init__(rollout_actor, tokenizer, cache(256, *sizes))

            def generate(self, *_: Any, **__: Any) -> Any:
                return next(left)

        return Repeated


def qwen3(folder: Path) -> Any:
    """A Qwen3 of Tunix with a million parameters, and its config.json."""
    module = importlib.import_module("tunix.models.qwen3.model")
    config = {"model_type": "qwen3", "num_hidden_layers": 5, "intermediate_size": 384}
    rope = {"rope_theta": 1_000_000.0}
    write_config(folder, {**SHAPE, **config, **rope})
    shape = module.ModelConfig(
        num_layers=5,
        vocab_size=EOS + 1,
        hidden_dim=384,
        **SIZES,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return module.Qwen3(shape, rngs=nnx.Rngs(0))


def gemma3(folder: Path) -> Any:
    """A Gemma 3 of Tunix with a million parameters, and its config.json."""
    module = importlib.import_module("tunix.models.gemma3.model")
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "intermediate_size": 320,
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    write_config(folder, {**SHAPE, **config})
    shape = module.ModelConfig(
        num_layers=6,
        num_embed=EOS + 1,
        hidden_dim=320,
        **SIZES,
        sliding_window_size=16,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    model = module.Gemma3(shape, rngs=nnx.Rngs(0))
    draw_matrices(model)
    return model


def draw_matrices(model: Any) -> None:
    """Random values for matrices: those of the MLPs begin with zeros."""
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    state = nnx.state(model, nnx.Param)

    def drawn(each: Any) -> Any:
        if each.ndim < 2:
            return each
        return 0.08 * jax.random.normal(next(keys), each.shape)

    nnx.update(model, jax.tree.map(drawn, state))


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the config.json of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def with_adapters(model: Any) -> Any:
    """The model with adapters of rank 4 at all linear layers."""
    qwix = importlib.import_module("qwix")
    provider = qwix.LoraProvider(
        module_path=".*(q_einsum|kv_einsum|attn_vec_einsum|.*_proj)", rank=RANK, alpha=ALPHA
    )
    inputs = jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None], None, jnp.ones((1, 4, 4), bool)
    return qwix.apply_lora_to_model(model, provider, *inputs, rngs=nnx.Rngs(3))


def cluster_of(
    actor: Any, engine: Any, reference: Any, *, rate: float = 1.0, size: int = 32, steps: int = 1
) -> Any:
    """A cluster with one mesh for all roles, and plain gradient descent; `size` bounds the tokens of an answer."""
    clusters = importlib.import_module("tunix.rl.rl_cluster")
    base = importlib.import_module("tunix.rl.rollout.base_rollout")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = clusters.RLTrainingConfig(
        actor_optimizer=optax.sgd(rate),
        eval_every_n_steps=10_000,
        max_steps=steps,
        mini_batch_size=len(PROMPTS),
        train_micro_batch_size=len(PROMPTS),
    )
    config = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(clusters.Role, mesh),
        rollout_engine=engine,
        training_config=training,
        rollout_config=base.RolloutConfig(
            max_tokens_to_generate=size,
            max_prompt_length=32,
            temperature=1.0,
            top_p=None,
            return_logprobs=True,
            kv_cache_size=128,
        ),
    )
    return clusters.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=ByteTokenizer(),
        cluster_config=config,
    )


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of plain letters."""
    return [len(text.encode("ascii", "ignore")) / 32 for text in completions]


def train(actor: Any, engine: Any) -> tuple[Any, Any]:
    """One step of `GRPOLearner`: the cluster, and the parameters of the actor afterwards."""
    grpo = importlib.import_module("tunix.rl.grpo.grpo_learner")
    cluster = cluster_of(actor, engine, nnx.clone(actor))
    config = grpo.GRPOConfig(num_generations=GENERATIONS, num_iterations=2, beta=0.04)
    learner = grpo.GRPOLearner(cluster, config, reward)
    learner.train([{"prompts": np.array(PROMPTS)}])
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    return cluster, jax.tree.map(np.asarray, nnx.to_pure_dict(trained))


def engine_of(folder: Path, **others: Any) -> Any:
    """The engine for a model directory."""
    return orca_rollout(
        str(folder),
        tokenizer="byte",
        load_format="dummy",
        dtype="float32",
        max_num_seqs=ROWS,
        max_num_batched_tokens=128,
        max_model_len=128,
        progress=False,
        **others,
    )


def check_gradients(make: Any, folder: Path) -> None:
    """Compare the parameters after a step on rollouts of the engine and on the same tokens of `vanilla`."""
    recorded = Recorded()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(make(folder), nnx.Param)))
    cluster, ours = train(make(folder), recorded.keep(engine_of(folder)))
    cluster.rollout.llm.close()
    _, theirs = train(make(folder), recorded.repeat())
    moved = largest(jax.tree.map(np.subtract, ours, before))
    error = largest(jax.tree.map(np.subtract, ours, theirs))
    print(f"  GRPO: parameters moved by {moved:.1e}, and differ by {error:.1e} from vanilla's")
    assert moved > 0
    assert error <= TOLERANCE * moved, "another gradient"


def largest(tree: Any) -> float:
    """The largest absolute value of a tree."""
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def check_agents(make: Any, folder: Path) -> None:
    """Train by the agentic learner, with many threads on one engine."""
    grpo = importlib.import_module("tunix.rl.agentic.agentic_grpo_learner")
    cluster = cluster_of(make(folder), engine_of(folder), None, rate=0.01, size=LONG, steps=2)
    config = grpo.GRPOConfig(
        num_generations=GENERATIONS,
        max_concurrency=THREADS,
        max_response_length=LONG,
        beta=0.0,
        use_rollout_logps=True,
    )
    rollout = cluster.rollout
    learner = grpo.GRPOLearner(cluster, config, reward_fns=reward, chat_parser=PlainChat())
    batch = batch_during(rollout, lambda: learner.train([{"prompts": np.array(PROMPTS)}] * 2))
    versions = rollout.llm.engine.weight_version
    print(
        f"  agents: {batch:.1f} requests an iteration, while Tunix also trains; {versions} versions"
    )
    assert versions > 1, "the weights were not synchronised"
    settings = cluster.cluster_config.rollout_config

    def run() -> None:
        for _ in range(CALLS):
            rollout.generate(PROMPTS[0], settings)

    def call() -> None:
        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    batch = batch_during(rollout, call)
    print(f"  {THREADS} threads without pauses: {batch:.1f} requests an iteration")
    assert batch >= LEAST_BATCH * min(THREADS, ROWS), "small batches"
    rollout.llm.close()


def batch_during(rollout: Any, call: Callable[[], object]) -> float:
    """The mean number of requests in the iterations of a call."""
    before = rollout.llm.engine.stats
    call()
    after = rollout.llm.engine.stats
    requests = after.scheduled_requests - before.scheduled_requests
    return float(requests / (after.iterations - before.iterations))


def check_adapters(make: Any, folder: Path) -> None:
    """Train adapters, and compare the engine's log probabilities with those of Tunix after the sync."""
    common = importlib.import_module("tunix.rl.common")
    cluster, _ = train(with_adapters(make(folder)), engine_of(folder, lora_alpha=ALPHA))
    rollout = cluster.rollout
    assert rollout.llm.engine.weight_version == 3, "the weights, the adapter, and its update"
    config = cluster.get_rollout_config(importlib.import_module("tunix.rl.rl_cluster").Mode.TRAIN)
    output = rollout.generate(PROMPTS[:4], config)
    rows = [[*each, *[EOS] * (32 - len(each))] for each in output.tokens]
    given = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(rows)
    graph, params = nnx.split(cluster.actor_trainer.model)
    options = {"pad_id": EOS, "eos_id": EOS}
    theirs = np.asarray(common.compute_per_token_logps(graph, params, *given, **options))
    ours = np.asarray(rollout.get_per_token_logps(*given))
    used = np.arange(32) < np.array(list(map(len, output.tokens)))[:, None]
    error = np.abs(np.where(used, ours - theirs, 0)).max()
    print(f"  adapters: log probabilities differ by {error:.1e} after a sync of adapters alone")
    assert error <= 2e-5 * np.abs(theirs).max()
    rollout.llm.close()


def check_learners() -> None:
    """Run all checks for both models."""
    for make in (qwen3, gemma3):
        with tempfile.TemporaryDirectory() as folder:
            name = make.__name__
            count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(make(Path(folder)))))
            print(f"{name}: {count / 1e6:.2f} M parameters")
            check_gradients(make, Path(folder))
            check_adapters(make, Path(folder))
            check_agents(make, Path(folder))


if __name__ == "__main__":
    check_learners()
