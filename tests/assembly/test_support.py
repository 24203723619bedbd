"""The table of support: each row refuses something, and no refusal of a combination is outside of it."""

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from orca_jax.assembly.support import MOMENTS, NEEDS, Facts, Moment, check_support, refusal
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.layer_config import ExpertsConfig
from orca_jax.sim.toy import TOY_MODEL
from tests.project.source import ROOT

DRAFTS = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("preset:toy", "demo", "org/name"),
    "scheduler": ("orca", "chunked", "request_level"),
    "scheduling_policy": ("fcfs", "shortest"),
    "speculative_config": (None, DRAFTS, NGRAM),
    "pipeline_parallel_size": (1, 2),
    "enable_lora": (False, True),
    "quantization": (None, "int8"),
    "max_num_batched_tokens": (None, 64),
    "max_loras": (None, 2),
    "max_lora_rank": (None, 8),
    "max_cpu_loras": (None, 9),
    "lora_modules": ((), ("a=b",)),
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
    "attention_implementation": (None, "xla", "triton"),
    "cpu_products": ("auto", "xla", "native"),
    "compile_cache": ("auto", "programs"),
}
"""Values of every setting of a row, and of those that decide about rows."""
MODELS = (
    TOY_MODEL,
    dataclasses.replace(TOY_MODEL, decoder="file.py:Own"),
    dataclasses.replace(TOY_MODEL, experts=ExpertsConfig(4, 2)),
    dataclasses.replace(TOY_MODEL, quantization="int4"),
    dataclasses.replace(TOY_MODEL, mixer_pattern=("short_conv", "attention"), num_layers=2),
    dataclasses.replace(TOY_MODEL, mixer_pattern=("short_conv",)),
)


@cache
def configs() -> list[EngineConfig]:
    """The defaults with each pair of values of two settings: no row reads more than its setting and one at a time."""
    pairs = itertools.combinations(VALUES, 2)
    chosen = [
        dict(zip(pair, each, strict=True))
        for pair in pairs
        for each in itertools.product(*(VALUES[name] for name in pair))
    ]
    return [EngineConfig(**values) for values in chosen]


def facts_of(config: EngineConfig, moment: Moment) -> Iterator[Facts]:
    if moment in ("settings", "toy", "events"):
        yield Facts(config)
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
    for config in configs():
        for facts in facts_of(config, moment):
            found = refusal(facts, moment)
            used = [row for row in rows if is_in_use(config, row.setting, row.without_effect)]
            unmet = [row for row in used if not row.is_met(facts)]
            seen |= {(rows.index(row), row in unmet) for row in used}
            assert (None if found is None else found.param) == (unmet[0].setting if unmet else None)
            if found is not None:
                assert "{" not in found.message and "None" not in found.message, found.message
    assert seen == set(itertools.product(range(len(rows)), (True, False)))


def test_defaults_of_a_model_are_supported_on_every_platform() -> None:
    for platform in ("cpu", "gpu", "tpu"):
        facts = Facts(EngineConfig(), 2, TOY_MODEL, platform, "float32")
        check_support(facts, "settings", "hosts", "model", "platform", "update" if platform == "" else "events")


def test_the_checks_raise_the_refusal() -> None:
    with pytest.raises(ConfigError, match=r"does not cover file\.py:Own") as caught:
        check_support(Facts(EngineConfig(quantization="int8"), model=MODELS[1]), "settings", "model")
    assert caught.value.param == "quantization"


WORDS = re.compile(
    r"does not cover|has no effect (on|with|beside)|needs (nnodes|scheduler|enable_lora|the prefix cache)"
)
OF_COMMANDS = {
    "config.py": "the settings of speculation, within one value",
    "model/layers.py": "the weights of one layer, also in a plan of memory",
}
"""Files with refusals of other things than settings of an engine beside others. Folders of commands have flags."""
COMMANDS = ("batch/", "bench/", "cli/", "deploy/", "openai/", "plan/", "playground/", "serve/", "timeline/")


def refusals() -> Iterator[tuple[str, str]]:
    """The files of the package with the words of refusals in the text of a `ConfigError`."""
    for path in sorted((ROOT / "orca_jax").rglob("*.py")):
        name = path.relative_to(ROOT / "orca_jax").as_posix()
        if name.startswith(COMMANDS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
            if is_text and WORDS.search(str(getattr(node, "value", ""))):
                yield name, str(getattr(node, "value", ""))


def test_no_refusal_of_a_combination_is_outside_of_the_table() -> None:
    found = list(refusals())
    assert {name for name, _ in found} == {"assembly/support.py", *OF_COMMANDS}
