"""The engine with the toy model or its clock, and the toy's executor, for one process and for several."""

from orca_jax.assembly.adapters import load_first, read_toy_adapter
from orca_jax.assembly.built import Built, join_parts, refuse_toy, summary_of
from orca_jax.assembly.choices import TOY, Choices
from orca_jax.assembly.described import tokenizer_of
from orca_jax.assembly.devices import Host
from orca_jax.assembly.scheduler import build_scheduling, speculating, timeline_header
from orca_jax.assembly.support import Facts, check_support
from orca_jax.cluster.messages import ToyJob
from orca_jax.sim.clock import Clock, clock_latency
from orca_jax.sim.toy import TOY_MODEL, Override, ToyExecutor
from orca_jax.text.grammar import GrammarFactory
from orca_jax.values.cache_spec import ceil_div, one_group
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.startup import StartTimes

# seconds per iteration of the toy, so that a busy one leaves processor time to other processes
TOY_LATENCY = 0.001
TOY_BUDGET = 2048


def build_toy(config: EngineConfig, choices: Choices, times: StartTimes, host: Host) -> Built:
    """Build an engine for tests and load tests: it starts at once and needs no JAX.

    Raises:
        ConfigError: a setting has no effect on the toy; `param` names it.
    """
    check_support(Facts(config, model=TOY_MODEL), "toy", "model")
    max_model_len = config.max_model_len or TOY_MODEL.max_positions
    rows = choices.requests.num_rows
    pages = choices.pages
    num_pages = pages.number or ceil_div(rows * (max_model_len + pages.size - 1), pages.size)
    cache = CacheConfig(one_group(TOY_MODEL.layer_caches), (num_pages,), pages.size, "float32")
    budget = config.max_num_batched_tokens or max(TOY_BUDGET, 2 * config.max_num_seqs)
    plain, pool = build_scheduling(choices, TOY_MODEL, max_model_len, cache, budget)
    scheduler = speculating(choices.drafts, plain, budget, {})
    latency = TOY_LATENCY if config.model == TOY else clock_latency(config.model)
    job = ToyJob(TOY_MODEL.vocab_size, num_pages, pages.size, rows, latency, choices.devices.stages)
    toy = toy_executor(job, None if config.model == TOY else Clock(latency))
    host.gather()
    host.share(job)
    host.meet()
    header = timeline_header(config, cache, max_model_len, budget)
    engine = join_parts(host.lead(toy), scheduler, pool, header, toy.adapters)
    reader = load_first(engine, config.lora_paths, read_toy_adapter if choices.lora else None)
    summary = summary_of(header, pool, times.report())
    tokenizer = tokenizer_of(config.tokenizer, config.model)
    grammars = GrammarFactory(tokenizer, TOY_MODEL.vocab_size, TOY_MODEL.eos_token_ids)
    return Built(
        engine,
        tokenizer,
        grammars,
        TOY_MODEL,
        max_model_len,
        header,
        summary,
        refuse_toy,
        read_adapter=reader,
        reads=choices.batches.reads,
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
