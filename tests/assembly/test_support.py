"""The table of support: each row refuses something, and no refusal of a combination is outside of it."""

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from orca_jax.assembly.support import (
    MOMENTS,
    NEEDS,
    WHOLE_SLICES,
    Facts,
    Moment,
    check_support,
    refusal,
)
from orca_jax.batch.config import BatchConfig
from orca_jax.flags.needs import FLAG_NEEDS
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.values.config import EngineConfig, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import (
    ExpertsConfig,
    LatentConfig,
    LayerInputs,
    LayerKind,
    MambaConfig,
    MixerName,
    WideConfig,
)
from orca_jax.values.platforms import PLATFORMS
from orca_jax.values.speculation import SpeculativeConfig
from tests.project.source import python_files

DRAFTS = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("preset:toy", "demo", "org/name", "preset:gpt2", "preset:clock-5", "a.gguf"),
    "tokenizer": (None, "byte"),
    "scheduler": ("orca", "chunked", "request_level", "tests.policy.turns:Turns"),
    "scheduler_options": (None, "{}"),
    "max_num_rows": (None, 9, 999),
    "scheduling_policy": ("fcfs", "shortest"),
    "speculative_config": (None, DRAFTS, NGRAM),
    "pipeline_parallel_size": (1, 2, 9),
    "max_model_len": (None, 64, 99999),
    "max_num_seqs": (64, 65),
    "enable_lora": (False, True),
    "quantization": (None, "int8"),
    "max_num_batched_tokens": (None, 64),
    "max_loras": (None, 2),
    "max_lora_rank": (None, 8),
    "max_cpu_loras": (None, 1, 9),
    "lora_modules": ((), ("a=b",), tuple(f"a{n}=b" for n in range(9))),
    "revision": (None, "main"),
    "download_dir": (None, "cache"),
    "load_format": ("auto", "orbax"),
    "n_workers": (None, 2),
    "n_slots": (None, 64),
    "overlap": (None, True),
    "enable_prefix_caching": (None, False, True),
    "itl_target_ms": (None, 100.0),
    "check_in_interval": (1, 4),
    "decoder": (None, "file.py:Own"),
    "length_predictor": (None, "demo"),
    "dtype": ("auto", "float16"),
    "kv_cache_dtype": ("auto", "int8"),
    "tensor_parallel_size": (None, 2),
    "gpu_memory_utilization": (None, 0.5),
    "logprobs_mode": ("raw_logprobs", "processed_logits"),
    "attention_implementation": (None, "xla", "triton"),
    "cpu_products": ("auto", "xla", "native"),
    "compile_cache": ("auto", "programs"),
    "kv_disk": (None, "pages"),
    "retention": ("lru", "cost"),
    "kv_disk_size": (None, 2**20),
    "kv_host_memory": (None, 2**20),
}
"""Values of every setting of a row, and of those that decide about rows."""


def with_mixer(mixer: MixerName, **sizes: Any) -> ModelConfig:
    """The toy's configuration with another mixer in its layer."""
    return dataclasses.replace(TOY_MODEL, layers=(LayerKind(mixer=mixer),), **sizes)


MODELS = (
    TOY_MODEL,
    dataclasses.replace(TOY_MODEL, decoder="file.py:Own"),
    dataclasses.replace(TOY_MODEL, experts=ExpertsConfig(4, 2)),
    dataclasses.replace(TOY_MODEL, quantization="int4"),
    dataclasses.replace(TOY_MODEL, quantization="int4", experts=ExpertsConfig(4, 2)),
    dataclasses.replace(TOY_MODEL, quantization="fp8"),
    dataclasses.replace(TOY_MODEL, layers=(LayerKind(mixer="short_conv"), LayerKind())),
    with_mixer("short_conv"),
    with_mixer("mamba", mamba=MambaConfig(4, 4, 1, 4, 4)),
    with_mixer("latent_attention", latent=LatentConfig(8, 4, 4)),
    dataclasses.replace(TOY_MODEL, attention_gate="all"),
    with_mixer("wide_attention", wide=WideConfig(8, 1)),
    dataclasses.replace(TOY_MODEL, layer_inputs=LayerInputs(4, 300)),
)


DECIDING = ("model", "scheduler", "scheduling_policy", "speculative_config", "pipeline_parallel_size", "enable_lora",
            "quantization", "enable_prefix_caching", "kv_disk", "max_num_batched_tokens", "max_num_seqs", "tokenizer",
            "overlap")  # fmt: skip
"""Settings that rows read beside their own one."""


def configs(moment: Moment) -> list[EngineConfig]:
    """The defaults with each pair of values of two settings: no row reads more than its setting and one at a time."""
    own = {need.setting for need in NEEDS if need.moment == moment and need.setting in VALUES}
    pairs = itertools.combinations([name for name in VALUES if name in own.union(DECIDING)], 2)
    chosen = [
        dict(zip(pair, each, strict=True))
        for pair in pairs
        for each in itertools.product(*(VALUES[name] for name in pair))
    ]
    return [EngineConfig(**values) for values in chosen]


def drafter(config: EngineConfig) -> str | None:
    return None if config.speculative_config is None else config.speculative_config.model


def facts_of(config: EngineConfig, moment: Moment) -> Iterator[Facts]:
    if moment in ("settings", "numbers", "toy", "events"):
        yield Facts(config)
        return
    if moment == "draft":
        for draft in (
            (*MODELS, dataclasses.replace(TOY_MODEL, vocab_size=9)) if drafter(config) else ()
        ):
            yield from (
                Facts(config, model=TOY_MODEL, draft=draft, max_model_len=length)
                for length in (8, 99999)
            )
        return
    if moment == "devices":
        for model, hosts, shards, number in itertools.product(MODELS, (1, 3), (1, 2, 3), (1, 9)):
            yield Facts(config, hosts, model, "cpu", shards=shards, num_devices=number)
        for shards in (3, 6):
            yield Facts(
                config,
                3,
                TOY_MODEL,
                "tpu",
                shards=shards,
                num_devices=1,
                device_kind=WHOLE_SLICES[0],
            )
        return
    if moment == "library":
        for has_library, dtype in itertools.product((False, True), ("float32", "bfloat16")):
            yield Facts(config, dtype=dtype, has_library=has_library)
        return
    for hosts, model in itertools.product((1, 2), MODELS):
        for platform, dtype in (("cpu", "float32"), ("cpu", "float16"), ("gpu", "bfloat16")):
            yield Facts(config, hosts, model, platform, dtype)


def is_in_use(config: EngineConfig, setting: str, idle: tuple[object, ...]) -> bool:
    return getattr(config, setting, None) not in idle


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_row_is_met_and_unmet_and_the_first_unmet_one_is_named(moment: Moment) -> None:
    rows = [need for need in NEEDS if need.moment == moment]
    seen: set[tuple[int, bool]] = set()
    for config in configs(moment):
        used = {
            index: row
            for index, row in enumerate(rows)
            if is_in_use(config, row.setting, row.without_effect)
        }
        for facts in facts_of(config, moment):
            found = refusal(facts, moment)
            met = {index: row.is_met(facts) for index, row in used.items()}
            seen |= set(met.items())
            unmet = [rows[index].setting for index, is_met in met.items() if not is_met]
            assert ([] if found is None else [found.param]) == unmet[:1]
            if found is not None:
                assert "{" not in found.message and "None" not in found.message, found.message
    assert seen == set(itertools.product(range(len(rows)), (True, False)))


def test_defaults_of_a_model_are_supported_on_every_platform() -> None:
    for platform in PLATFORMS:
        facts = Facts(EngineConfig(), 2, TOY_MODEL, platform, "float32")
        check_support(
            facts,
            "settings",
            "hosts",
            "model",
            "platform",
            "update" if platform == "" else "events",
        )


def test_the_checks_raise_the_refusal() -> None:
    with pytest.raises(ConfigError, match=r"does not cover file\.py:Own") as caught:
        check_support(
            Facts(EngineConfig(quantization="int8"), model=MODELS[1]), "settings", "model"
        )
    assert caught.value.param == "quantization"


TABLES = ("assembly/support.py", "flags/needs.py")
OUTSIDE = {
    (
        "assembly/devices.py",
        "tensor_parallel_size",
    ): "devices of another process, found when it has joined",
    (
        "assembly/scheduler.py",
        "length_predictor",
    ): "two files that do not fit: a ranker and a model",
    ("batch/check.py", "body"): "a key within one value",
    ("batch/check.py", "max_logprobs"): "the range of a number",
    ("batch/input.py", "input"): "a file that changed; a flag is the remedy",
    (
        "tools/bench/online/load.py",
        "warmup_requests",
    ): "the range of a number, known after the file of requests is read",
    ("tools/bench/start.py", "model"): "the same value twice",
    (
        "values/speculation.py",
        "prompt_lookup_max",
    ): "keys of one value, which its class checks alone",
    ("exec/cache.py", "max_model_len"): "a lack of memory; flags are the remedy",
    ("helpers/gguf_file/header.py", "model"): "a file that is one of several",
    ("model/weight_files.py", "model"): "an adapter in place of a model; flags are the remedy",
    ("sched/blocks.py", "n_slots"): "the range of a number, known after the memory is counted",
    ("serve/listen.py", "ssl_certfile"): "two files that do not fit: a key and a certificate",
    ("sim/clock.py", "model"): "the form of one value",
    ("serve/telemetry/otel.py", "otlp_traces_endpoint"): "a library that is not installed",
    ("timeline/read.py", "trace"): "the content of a file; a flag is the remedy",
}
"""Errors that mention two settings, or one beside something else, and refuse no combination: by file and setting."""
SETTINGS = {
    field.name
    for kind in (EngineConfig, ServerConfig, BatchConfig, SpeculativeConfig)
    for field in dataclasses.fields(kind)
} | {need.flag for needs in FLAG_NEEDS.values() for need in needs}
LINKS = re.compile(
    r"\bneeds?\b|no effect|combined|does not cover|\bis for\b|only for\b|contradicts|together|\bbeside\b|excludes?\b"
)
REFUSING = re.compile(r"(?:Error|require|_unfit|_refused|error)$")
OF_REQUESTS = ("RequestError", "ApiError")
"""Errors of requests, whose fields are no settings."""


def text_of(node: ast.AST | None) -> str:
    """The text of a string expression, with its placeholders in braces; empty for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or f"{{{ast.unparse(part)[1:-1]}}}" for part in node.values)
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else ""


def mentioned(text: str) -> set[str]:
    """The settings in a text: names with an underscore, flags, and fields in placeholders."""
    words = set(re.findall(r"(?<![\w.])[a-z]+(?:_[a-z]+)+(?!\w)", text))
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]+)", text)}
    values = set(
        re.findall(
            r"(?:config|args|settings|engine)\.(\w+)", " ".join(re.findall(r"\{([^}]*)\}", text))
        )
    )
    return (words | flags | values) & SETTINGS


def refusals(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, set[str]]]:
    """The errors of a file that mention two settings, or one with a word that links it to something else.

    Each is (`param`, or the first setting; all settings). A message may be in a variable of the function.
    """
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = list(ast.walk(function))
        assigned = sorted(
            (node for node in inside if isinstance(node, ast.Assign)), key=lambda node: node.lineno
        )
        for call in (node for node in inside if isinstance(node, ast.Call)):
            name = (
                call.func.attr
                if isinstance(call.func, ast.Attribute)
                else getattr(call.func, "id", "")
            )
            if REFUSING.search(name) is None or name in OF_REQUESTS:
                continue
            before = [node for node in assigned if node.lineno < call.lineno]
            variables = {ast.unparse(node.targets[0]): text_of(node.value) for node in before}
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            texts = [
                text_of(value) or variables.get(getattr(value, "id", ""), "") for value in values
            ]
            params = [text for text in texts if text in SETTINGS]
            text = " ".join(text for text in texts if text not in SETTINGS)
            found = mentioned(text) | set(params)
            if len(found) > 1 or (found and LINKS.search(text)):
                yield [*params, *sorted(found)][0], found


def test_no_refusal_of_a_combination_is_outside_of_the_tables() -> None:
    found = set()
    for file in python_files("orca_jax"):
        name = file.path.relative_to("orca_jax").as_posix()
        if name not in TABLES:
            found |= {(name, param) for param, _ in refusals(file.nodes)}
    assert found == set(OUTSIDE), "put it into a table, or say why it is not a combination"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("raise ConfigError(f'n_slots {n} is less than num_pages', param='n_slots')", True),
        ("raise ConfigError('n_slots must be at least 1', param='n_slots')", False),
        ("raise ConfigError('n_slots does not cover mixtures', param='n_slots')", True),
        (
            "message = f'overlap needs {args.scheduler}'\n    raise ConfigError(message, param='overlap')",
            True,
        ),
        ("require(ok, 'uds', 'has no effect with TLS')", True),
        ("require(ok, 'uds', 'leave it out with --host')", True),
        ("raise RequestError('max_tokens needs n_slots', param='n_slots')", False),
    ],
)
def test_refusals_are_found_by_their_words(code: str, is_found: bool) -> None:
    assert bool(list(refusals(ast.parse(f"def f():\n    {code}").body))) == is_found
