"""The one place where floors meet: from what the user said to an engine that runs."""

from collections.abc import Callable
from dataclasses import dataclass

from orca_jax.config import EngineConfig, ModelConfig, SchedulerConfig
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import Scheduler
from orca_jax.sim.toy import ToyExecutor
from orca_jax.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

TOY = "preset:toy"
TOY_LATENCY = 0.001  # seconds for an iteration of the toy, so that a busy one leaves the processor to others
TOY_PAGE_SIZE = 16
TOY_MAX_MODEL_LEN = 16384

SCHEDULERS: dict[str, Callable[[int, int], Scheduler]] = {
    "orca": OrcaScheduler,
    "request_level": RequestLevelScheduler,
}


@dataclass(frozen=True)
class Built:
    """An engine and what its faces have to know. Whoever built it closes `engine.executor`."""

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig
    max_model_len: int  # prompt and generated tokens of one request


def build_engine(config: EngineConfig) -> Built:
    """Resolve every "auto" and put the parts together.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    if config.model == TOY:
        return _build_toy(config)
    raise ConfigError(f"no model {config.model!r}", param="model")


def _build_toy(config: EngineConfig) -> Built:
    """The toy model behind the real engine: starts at once and needs no JAX, for tests and load on the faces."""
    model = ModelConfig(
        family="toy",
        vocab_size=257,
        num_layers=1,
        embed_dim=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        mlp_dim=1,
        max_positions=TOY_MAX_MODEL_LEN,
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu",
        gated_mlp=False,
        attention_bias=False,
        mlp_bias=False,
        tied_embeddings=True,
        eos_token_ids=(256,),
    )
    max_model_len = config.max_model_len or TOY_MAX_MODEL_LEN
    page_size = config.page_size or TOY_PAGE_SIZE
    rows = config.max_num_seqs * config.n_workers
    num_pages = config.num_pages or rows * (-(-max_model_len // page_size))
    n_slots = config.n_slots or max(1, num_pages * page_size - rows * (page_size - 1))
    scheduler = SchedulerConfig(config.scheduler, config.max_num_seqs, max_model_len, n_slots, config.n_workers)
    kv = KVManager(num_pages, page_size, scheduler.num_rows, n_slots)
    executor = ToyExecutor(model.vocab_size, num_pages, page_size, rows, latency=TOY_LATENCY, check_pages=False)
    pool = RequestPool(kv, vocab_size=model.vocab_size, max_model_len=max_model_len, eos_token_ids=model.eos_token_ids)
    decide = SCHEDULERS[scheduler.name](scheduler.max_num_seqs, scheduler.n_workers)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else ByteTokenizer()
    return Built(Engine(executor, decide, pool, seed=config.seed), tokenizer, model, max_model_len)
