"""Every setting is honoured or refused by name, in every combination: none is accepted and ignored."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main as lab
from orca_jax.assembly.built import Built
from orca_jax.assembly.choices import Budget, choices_of, ordering_kind, scheduler_kind
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.assembly.support import NEEDS, adapted, check_settings
from orca_jax.batch.args import parse_args as batch_args
from orca_jax.batch.config import BatchConfig
from orca_jax.flags.texts import help_of
from orca_jax.sched.orderings.base import Ordering
from orca_jax.serve.args import parse_args as serve_args
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.tools.bench.__main__ import main as bench
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import (
    ORDERINGS,
    PREDICTORS,
    RETENTIONS,
    SCHEDULERS,
    CacheConfig,
    EngineConfig,
    Named,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import PLATFORMS

MODEL = str(Path(__file__).parent / "fixtures" / "reference" / "gpt2-12-heads")
CHUNKED: dict[str, Any] = {"scheduler": "chunked"}
ORCA: dict[str, Any] = {"scheduler": "orca"}
POLICY = "tests.policy.turns:Turns"
BASELINE: dict[str, Any] = {"scheduler": "request_level"}
SHORTEST: dict[str, Any] = {"scheduling_policy": "shortest"}
LORA: dict[str, Any] = {"enable_lora": True}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
DRAFTS: dict[str, Any] = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}

# Settings of an engine without effect in a combination, each with the words of its refusal.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"kv_disk": "pages"}, "kv_disk", "has no weights"),
    ({"kv_host_memory": 9}, "kv_host_memory", "has no weights"),
    ({"kv_disk_size": 9}, "kv_disk_size", "give kv_disk"),
    ({**ORCA, "kv_disk": "pages"}, "kv_disk", "needs the prefix cache"),
    ({**ORCA, "retention": "cost"}, "retention", "needs the prefix cache"),
    ({"max_num_batched_tokens": 63}, "max_num_batched_tokens", "less than max_num_seqs 64"),
    (
        {"max_num_batched_tokens": 4, "max_num_seqs": 5},
        "max_num_batched_tokens",
        "lower max_num_seqs",
    ),
    ({**ORCA, "overlap": True}, "overlap", "needs scheduler chunked"),
    ({**BASELINE, "overlap": True}, "overlap", "needs scheduler chunked"),
    ({**ORCA, "enable_prefix_caching": True}, "enable_prefix_caching", "needs scheduler chunked"),
    ({**BASELINE, "enable_prefix_caching": True}, "enable_prefix_caching", "no prefix cache"),
    ({"revision": "main"}, "revision", "not a name of the Hub"),
    ({"download_dir": "cache"}, "download_dir", "not a name of the Hub"),
    (
        {"length_predictor": "quantiles"},
        "length_predictor",
        "no effect with scheduling_policy fcfs",
    ),
    ({"length_predictor": "bound"}, "length_predictor", "no effect"),
    (
        {"length_predictor": "demo", "scheduling_policy": "fair"},
        "length_predictor",
        "scheduling_policy fair",
    ),
    ({**ORCA, "length_predictor": "quantiles"}, "length_predictor", "no effect"),
    ({"max_num_rows": 100}, "max_num_rows", "never pauses a request"),
    (
        {"scheduler": POLICY, "max_num_rows": 63},
        "max_num_rows",
        "at least max_num_seqs for each stage",
    ),
    ({"scheduler_options": "{}"}, "scheduler_options", "no effect with scheduler chunked"),
    ({**ORCA, **SHORTEST}, "scheduling_policy", "needs scheduler chunked"),
    ({**BASELINE, "scheduling_policy": "priority"}, "scheduling_policy", "needs scheduler chunked"),
    (
        {"n_workers": 2},
        "n_workers",
        "needs pipeline_parallel_size above 1, or scheduler orca or request_level",
    ),
    (
        {"pipeline_parallel_size": 2, "overlap": True},
        "overlap",
        "needs pipeline_parallel_size 1, not 2",
    ),
    ({"check_in_interval": 4, "pipeline_parallel_size": 2}, "check_in_interval", "in one stage"),
    (
        {"decoder": "mine:Mine", "pipeline_parallel_size": 2},
        "decoder",
        "needs pipeline_parallel_size 1, not 2",
    ),
    ({"decoder": "mine:Mine"}, "decoder", "no effect on preset:toy"),
    ({"n_slots": 100}, "n_slots", "num_pages"),
    ({**ORCA, "itl_target_ms": 100.0}, "itl_target_ms", "needs scheduler chunked"),
    (
        {"itl_target_ms": 100.0, "max_num_batched_tokens": 64},
        "itl_target_ms",
        "leave one of them out",
    ),
    ({"itl_target_ms": 0.0}, "itl_target_ms", "a positive number of milliseconds"),
    ({"itl_target_ms": inf}, "itl_target_ms", "a positive number of milliseconds"),
    ({"itl_target_ms": 100.0}, "itl_target_ms", "no effect on preset:toy"),
    ({**ORCA, "check_in_interval": 4}, "check_in_interval", "needs scheduler chunked"),
    ({"overlap": False, "check_in_interval": 4}, "check_in_interval", "with overlap"),
    (
        {"check_in_interval": 4, "speculative_config": NGRAM},
        "check_in_interval",
        "without speculative_config",
    ),
    ({"speculative_config": DRAFTS}, "speculative_config", "no effect on preset:toy"),
    ({"max_loras": 2}, "max_loras", "needs enable_lora"),
    ({"max_lora_rank": 8}, "max_lora_rank", "needs enable_lora"),
    ({"max_cpu_loras": 9}, "max_cpu_loras", "needs enable_lora"),
    ({"lora_modules": ("a=b",)}, "lora_modules", "needs enable_lora"),
    ({"load_format": "safetensors"}, "load_format", "no weights"),
    ({"dtype": "float32"}, "dtype", "no effect on preset:toy"),
    ({"quantization": "int8"}, "quantization", "no effect on preset:toy"),
    ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype", "no effect on preset:toy"),
    ({"logprobs_mode": "raw_logits"}, "logprobs_mode", "no effect on preset:toy"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size", "no device"),
    ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization", "no device"),
    ({"attention_implementation": "xla"}, "attention_implementation", "no effect on preset:toy"),
    ({"cpu_products": "xla"}, "cpu_products", "no effect on preset:toy"),
    ({"compile_cache": "programs"}, "compile_cache", "no effect on preset:toy"),
    ({"model": "preset:clock-5", "dtype": "float32"}, "dtype", "no effect on preset:clock-5"),
    ({"model": "preset:gpt2-tiny", "load_format": "orbax"}, "load_format", "no weights"),
]

# A value of each setting that the toy engine honours, with the rest of the engine's settings.
HONOURED: dict[str, dict[str, Any]] = {
    "model": {"model": "preset:clock-3"},
    "tokenizer": {"tokenizer": "byte"},
    "decoder": {},
    "load_format": {"load_format": "dummy"},
    "revision": {},
    "download_dir": {},
    "hf_token": {},
    "dtype": {"dtype": "auto"},
    "quantization": {"quantization": None},
    "seed": {"seed": 7},
    "max_model_len": {"max_model_len": 32},
    "max_num_seqs": {"max_num_seqs": 3000},
    "max_num_rows": {"scheduler": POLICY, "max_num_rows": 4000},
    "scheduler": ORCA,
    "scheduler_options": {"scheduler": POLICY, "scheduler_options": "{}"},
    "scheduling_policy": {"scheduling_policy": "fair"},
    "length_predictor": {**SHORTEST, "length_predictor": "quantiles"},
    "overlap": {"overlap": True},
    "check_in_interval": {"check_in_interval": 4},
    "enable_prefix_caching": {"enable_prefix_caching": True},
    "retention": {"retention": "lru-ttl"},
    "n_workers": {**ORCA, "n_workers": 2},
    "n_slots": {**ORCA, "n_slots": 300},
    "tensor_parallel_size": {"tensor_parallel_size": 1},
    "pipeline_parallel_size": {"pipeline_parallel_size": 3},
    "page_size": {"page_size": 4},
    "num_pages": {"num_pages": 900},
    "kv_host_memory": {},
    "kv_disk": {},
    "kv_disk_size": {},
    "gpu_memory_utilization": {},
    "kv_cache_dtype": {"kv_cache_dtype": "auto"},
    "logprobs_mode": {},
    "speculative_config": {"speculative_config": NGRAM},
    "max_num_batched_tokens": {"max_num_batched_tokens": 64},
    "itl_target_ms": {},
    "compile_cache": {"compile_cache": None},
    "strict_compile": {"strict_compile": True},
    "attention_implementation": {},
    "cpu_products": {},
    # without accelerator kernels, there is none to test
    "kernel_self_test": {"kernel_self_test": False},
    "enable_lora": LORA,
    "max_loras": {**LORA, "max_loras": 2},
    "max_lora_rank": {**LORA, "max_lora_rank": 8},
    "max_cpu_loras": {**LORA, "max_cpu_loras": 9},
    "lora_modules": {**LORA, "lora_modules": ()},
    "trace_file": {},
    "progress": {"progress": False},
}


def built_with(**settings: Any) -> Built:
    return build_engine(EngineConfig(**{"model": "preset:toy", "max_model_len": 64, **settings}))


@pytest.mark.parametrize(("settings", "param", "words"), REFUSED, ids=str)
def test_a_setting_without_effect_is_refused(
    settings: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        built_with(**settings)
    assert caught.value.param == param and words in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_pages", 10**12, "must be at most 4194304, got 1000000000000"),
        ("max_num_seqs", 10**9, "must be at most 65536"),
        ("num_pages", 0, "must be at least 1, got 0"),
    ],
)
def test_a_number_out_of_range_is_refused(name: str, value: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        built_with(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", HONOURED)
def test_a_setting_with_effect_is_accepted(name: str) -> None:
    built_with(**HONOURED[name]).close()


def test_the_tables_have_every_setting() -> None:
    assert list(HONOURED) == [field.name for field in dataclasses.fields(EngineConfig)]
    refused = {param for _, param, _ in REFUSED}
    table = {need.setting for need in NEEDS if need.moment in ("settings", "toy")}
    assert refused == table | {"max_num_batched_tokens"}


def test_defaults_are_never_refused() -> None:
    for scheduler in SCHEDULERS:
        built_with(scheduler=scheduler).close()
        built_with(
            scheduler=scheduler, overlap=False, enable_prefix_caching=False, n_workers=1
        ).close()


def test_defaults_of_the_scheduler() -> None:
    chunked, plain = built_with(), built_with(overlap=False, enable_prefix_caching=False)
    assert (chunked.engine.scheduler.n_workers, plain.engine.scheduler.n_workers) == (2, 1)
    pools = (chunked.engine.pool, plain.engine.pool)
    assert [pool.reuses_prefixes for pool in pools] == [True, False]
    assert all([pool.reuse is not None for pool in pools]), "requests of one call share in both"
    assert built_with(**ORCA).engine.pool.reuse is None


def test_the_default_budget_never_caps_the_batch() -> None:
    for platform in PLATFORMS:
        for rows in (1, 64, 5000):
            budget = Budget(None, rows, itl_target_ms=0.001)
            assert budget.tokens(platform, dict.fromkeys(budget.sizes(platform), 9.0)) >= rows
    assert built_with(max_num_seqs=5000).timeline_header.budget >= 5000


def test_a_budget_from_elsewhere_is_checked_too() -> None:
    """A replay has the budget of the recorded engine, not that of its settings."""
    cache = CacheConfig(one_group(TOY_MODEL.layer_caches), (1000,), 16, "float32")
    with pytest.raises(ConfigError, match="less than max_num_seqs 65"):
        build_scheduling(choices_of(EngineConfig(max_num_seqs=65)), TOY_MODEL, 128, cache, 64)


def test_named_classes_are_there() -> None:
    for name, row in SCHEDULERS.items():
        assert scheduler_kind(name).traits == row.traits
    for name in ORDERINGS:
        assert issubclass(ordering_kind(name), Ordering)


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("scheduler", SCHEDULERS),
        ("scheduling_policy", ORDERINGS),
        ("length_predictor", PREDICTORS),
        ("retention", RETENTIONS),
    ],
)
def test_the_help_has_every_name(setting: str, table: Mapping[str, Named]) -> None:
    assert [name for name in table if name not in help_of(setting)] == []


def test_settings_of_another_scheduler_are_left_out() -> None:
    config = EngineConfig(
        **SHORTEST, length_predictor="demo", overlap=True, enable_prefix_caching=True, num_pages=9
    )
    orca = adapted(dataclasses.replace(config, scheduler="orca"))
    assert orca == EngineConfig(scheduler="orca", num_pages=9)
    assert adapted(config) == config
    with pytest.raises(ConfigError, match="overlap"):
        check_settings(adapted(dataclasses.replace(config, scheduler="orca"), ("overlap",)))


def test_several_workers_on_one_stage_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built_with(**ORCA, n_workers=2).close()
        built_with(**ORCA).close()
    (record,) = caplog.records
    assert "n_workers is 2" in record.getMessage() and "one pipeline stage" in record.getMessage()


def test_more_shards_than_cores_are_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    with caplog.at_level(logging.WARNING):
        for shards in (2, 4):
            with pytest.raises(ConfigError, match="in float16"):  # before any weight is read
                build_engine(
                    EngineConfig(
                        *(MODEL, "byte"),
                        tensor_parallel_size=shards,
                        cpu_products="native",
                        dtype="float16",
                        progress=False,
                    )
                )
    (record,) = caplog.records
    assert "tensor_parallel_size 4 is more than the 2 cores" in record.getMessage()


# Flags of the server: each is read on every run, except for these, which need another one.
SERVER_REFUSED = {
    "host": "--uds x --host 127.0.0.1",
    "port": "--uds x --port 8000",
    "allowed_hosts": "--uds x --allowed-hosts a",
    "ssl_keyfile": "--ssl-keyfile x",
    "ssl_certfile": "--ssl-certfile x",
    "ssl_ca_certs": "--ssl-ca-certs x",
    "cache_salt_per_key": "--cache-salt-per-key",
    "allow_credentials": "--allow-credentials",
    "admin_key_file": "--admin-key-file x",
    "weights_root": "--weights-root x",
    "lora_dir": "--lora-dir x",
    "kv_events_endpoint": "--kv-events-endpoint tcp://0.0.0.0:5557",
    "kv_events_replay_endpoint": "--kv-events-replay-endpoint tcp://127.0.0.1:5558",
    "kv_events_topic": "--kv-events-topic t",
    "kv_events_allow_remote": "--kv-events-allow-remote",
    "node_rank": "--node-rank 0",  # its default value
    "master_addr": "--master-addr 127.0.0.1",
    "master_port": "--master-port 29501",
    "cluster_key_file": "--cluster-key-file x",
    "control_timeout": "--control-timeout 5",
    "restart_workers": "--restart-workers",
    "mtls_cert_file": "--nnodes 2 --mtls-cert-file x",
    "mtls_key_file": "--nnodes 2 --mtls-key-file x",
    "mtls_ca_file": "--nnodes 2 --mtls-ca-file x",
    "restart_engine": "--nnodes 2 --restart-engine",
}


@pytest.mark.parametrize("name", SERVER_REFUSED)
def test_a_flag_of_the_server_without_effect_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve_args(SERVER_REFUSED[name].split())
    assert caught.value.param == name


BATCH_REFUSED = {
    "api_key_file": "--api-key-file x",
    "max_retries": "--max-retries 6",  # its default value
    "request_timeout": "--request-timeout 600",
    "chat_template": "--base-url http://h --chat-template x",
    "generation_config": "--base-url http://h --generation-config auto",
    "reasoning_parser": "--base-url http://h --reasoning-parser qwen3",
    "tool_call_parser": "--base-url http://h --tool-call-parser hermes",
    "max_logprobs": "--base-url http://h --max-logprobs 20",
    "served_model_name": "--base-url http://h --served-model-name one two",
    "model": "--base-url http://h --served-model-name one --model two",
    "max_num_seqs": "--base-url http://h --max-num-seqs 64",
    "scheduler": "--base-url http://h --scheduler chunked",
    "seed": "--base-url http://h --seed 0",
    "overlap": "--base-url http://h --no-overlap",
    "trace_file": "--base-url http://h --trace-file x",
}


@pytest.mark.parametrize("name", BATCH_REFUSED)
def test_a_flag_of_a_batch_without_effect_is_refused(name: str, tmp_path: Path) -> None:
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    with pytest.raises(ConfigError) as caught:
        batch_args([*files, *BATCH_REFUSED[name].split()])
    assert caught.value.param == name


BENCH_REFUSED = [
    ("online --base-url http://h --model m --pace 5", "pace"),
    ("online --base-url http://h --model m --server-flags --seed 3", "server_flags"),
    ("burst --model preset:toy --plot-unit seconds", "plot_unit"),
    ("offline --model preset:toy --length-scale 2", "length_scale"),
    ("schedulers --model preset:toy --overlap --schedulers orca request_level", "overlap"),
    (
        "schedulers --model preset:toy --schedulers orca --num-requests 2 --enable-prefix-caching",
        "enable_prefix_caching",
    ),
]


@pytest.mark.parametrize(("command", "named"), BENCH_REFUSED)
def test_a_flag_of_a_benchmark_without_effect_is_refused(
    command: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(command.split()) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "command", "flag"),
    [
        (bench, "schedulers", "--scheduler orca"),
        (bench, "schedulers", "--trace-file x"),
        (lab, "host", "--max-num-seqs 4"),
        (lab, "prefix", "--trace-file x"),
        (lab, "foresight --log x", "--length-predictor demo"),
        (lab, "foresight --log x", "--scheduling-policy fcfs"),
    ],
)
def test_a_benchmark_has_no_flag_that_it_sets_itself(
    main: Callable[[Sequence[str]], int],
    command: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), *flag.split()])
    assert (
        caught.value.code == 2
        and f"unrecognized arguments: {flag.split()[0]}" in capsys.readouterr().err
    )


def test_a_burst_leaves_the_other_scheduler_without_the_settings_of_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--model preset:toy --num-requests 3 --scheduler chunked --overlap --scheduling-policy shortest"
    assert bench(["burst", *flags.split()]) == 0
    assert "request_level" in capsys.readouterr().out


def test_all_settings_of_servers_and_batches_are_known() -> None:
    """A new field must be put into one of the tables, or into these lists of fields that every run reads."""
    model = {
        "served_model_name",
        "chat_template",
        "generation_config",
        "tool_call_parser",
        "max_logprobs",
    }
    model |= {"reasoning_parser", "override_generation_config", "default_chat_template_kwargs"}
    access = {"uds", "root_path", "api_key", "api_key_file", "allowed_origins", "playground"}
    queue = {
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_calls_per_key",
        "overload_status",
        "max_body_bytes",
    }
    queue |= {"responses_store"}
    times = {"queue", "request", "read", "write", "shutdown", "heartbeat", "step", "load"}
    others = {
        "engine",
        "nnodes",
        "unknown_fields",
        "log_format",
        "log_requests",
        "otlp_traces_endpoint",
        "calibration",
    }
    others |= {"enable_force_include_usage", "explain_cache"}
    always = model | access | queue | {f"{name}_timeout" for name in times} | others
    assert {field.name for field in dataclasses.fields(ServerConfig)} == always | set(
        SERVER_REFUSED
    )
    always = {
        "input",
        "output",
        "server",
        "format",
        "body",
        "order",
        "overwrite",
        "concurrency",
        "base_url",
    }
    assert {field.name for field in dataclasses.fields(BatchConfig)} <= always | set(BATCH_REFUSED)
