"""The engine with the toy model or its clock, and the toy's executor, for one process and for several."""

from orca_jax.assembly.adapters import load_first, toy_adapter_reader
from orca_jax.assembly.built import Built, join_parts, refuse_toy, summary_of, timeline_header
from orca_jax.assembly.devices import Host
from orca_jax.assembly.resolve import max_model_len_of, tokenizer_of
from orca_jax.assembly.scheduler import build_scheduling, num_rows
from orca_jax.assembly.settings import TOY
from orca_jax.assembly.speculation import speculating
from orca_jax.assembly.support import Facts, check_support
from orca_jax.cache_spec import one_group
from orca_jax.cluster.messages import ToyJob
from orca_jax.config import CacheConfig, EngineConfig
from orca_jax.sim.clock import Clock, clock_latency
from orca_jax.sim.toy import TOY_MODEL, Override, ToyExecutor
from orca_jax.startup import StartTimes
from orca_jax.text.grammar import GrammarFactory

TOY_LATENCY = 0.001  # seconds per iteration of the toy, so that a busy one leaves processor time to other processes
TOY_PAGE_SIZE = 16
TOY_BUDGET = 2048


def build_toy(config: EngineConfig, times: StartTimes, host: Host) -> Built:
    """Build an engine for tests and load tests: it starts at once and needs no JAX.

    Raises:
        ConfigError: a setting has no effect on the toy; `param` names it.
    """
    check_support(Facts(config, model=TOY_MODEL), "toy", "model")
    latency = TOY_LATENCY if config.model == TOY else clock_latency(config.model)
    max_model_len = max_model_len_of(config, TOY_MODEL)
    page_size = config.page_size or TOY_PAGE_SIZE
    rows = num_rows(config)
    num_pages = config.num_pages or -(-rows * (max_model_len + page_size - 1) // page_size)
    cache = CacheConfig(one_group(TOY_MODEL.layer_caches), (num_pages,), page_size, "float32")
    budget = config.max_num_batched_tokens or max(TOY_BUDGET, 2 * config.max_num_seqs)
    plain, pool = build_scheduling(config, TOY_MODEL, max_model_len, cache, budget)
    scheduler = speculating(config, plain, budget, {})
    job = ToyJob(TOY_MODEL.vocab_size, num_pages, page_size, rows, latency, config.pipeline_parallel_size)
    toy = toy_executor(job, None if config.model == TOY else Clock(latency))
    host.gather()
    host.share(job)
    host.meet()
    header = timeline_header(config, cache, max_model_len, budget)
    engine = join_parts(host.lead(toy), scheduler, pool, header, toy.adapters)
    reader = load_first(engine, config, toy_adapter_reader(config))
    tokenizer = tokenizer_of(config, config.model)
    grammars = GrammarFactory(tokenizer, TOY_MODEL.vocab_size, TOY_MODEL.eos_token_ids)
    summary = summary_of(header, pool.kv, times.report())
    return Built(
        engine, tokenizer, grammars, TOY_MODEL, max_model_len, header, summary, refuse_toy, read_adapter=reader
    )


def toy_executor(job: ToyJob, override: Override | None = None) -> ToyExecutor:
    """The executor of a toy."""
    return ToyExecutor(
        job.vocab_size,
        (job.num_pages,),
        job.page_size,
        job.num_rows,
        latency=job.latency,
        num_stages=job.num_stages,
        override=override,
        check_pages=False,
    )
