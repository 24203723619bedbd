"""Help texts, placeholders and other spellings of the settings of an engine and a server."""

import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template

from orca_jax.values.config import (
    ORDERINGS,
    PREDICTORS,
    RETENTIONS,
    SCHEDULERS,
    EngineConfig,
    Traits,
)
from orca_jax.values.platforms import platform_named


@cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


def help_of(name: str, kind: type = EngineConfig) -> str:
    """Return the help text of a field of these settings, from `texts.toml`."""
    constants = vars(sys.modules[kind.__module__])
    return Template(_texts()[kind.__name__][name]).safe_substitute(constants, **_listed())


@cache
def _listed() -> Mapping[str, str]:
    """The words of the classes that settings name, the schedulers by their traits, and the defaults of platforms."""
    *orders, last = [order.words for order in ORDERINGS.values()]
    return {
        **{trait: _able(trait) for trait in Traits._fields if trait != "reads"},
        "SCHEDULERS": "; ".join([scheduler.words for scheduler in SCHEDULERS.values()]),
        "ORDERINGS": f"{', '.join(orders)}, or {last}",
        "PREDICTORS": ", ".join([predictor.words for predictor in PREDICTORS.values()]),
        "RETENTIONS": "; ".join([each.words for each in RETENTIONS.values()]),
        "ITL": f"{platform_named('').itl_target_ms:g}",
        "ITL_ON_HOST": f"{platform_named('cpu').itl_target_ms:g}",
    }


def _able(trait: str) -> str:
    """The schedulers with a trait."""
    return " and ".join([name for name, row in SCHEDULERS.items() if getattr(row.traits, trait)])


ALIASES: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "page_size": ("--block-size",),
}

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "api_key_file",
            "chat_template",
            "cluster_key_file",
            "mtls_ca_file",
            "mtls_cert_file",
            "mtls_key_file",
        ),
        "FILE",
    ),
    **dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "trace_file"), "FILE"),
    **dict.fromkeys(("base_url", "otlp_traces_endpoint"), "URL"),
    **dict.fromkeys(
        ("compile_cache", "download_dir", "generation_config", "kv_disk", "lora_dir"), "DIR"
    ),
    **dict.fromkeys(("kv_disk_size", "kv_host_memory"), "SIZE"),
    **dict.fromkeys(("root_path", "tokenizer", "uds"), "PATH"),
    "allowed_hosts": "NAME",
    "allowed_origins": "ORIGIN",
    "api_key": "KEY",
    "body": "JSON",
    "decoder": "CLASS",
    "hf_token": "TOKEN",
    "host": "ADDRESS",
    "master_addr": "ADDRESS",
    "scheduler": "NAME",
    "scheduler_options": "JSON",
    "override_generation_config": "JSON",
    "default_chat_template_kwargs": "JSON",
    "speculative_config": "JSON",
    "lora_modules": "NAME=PATH",
    "model": "MODEL",
}
"""The placeholders that `--help` shows for values; a flag that is not listed has one by its type."""
JSON_FLAGS = frozenset([name for name, mark in METAVARS.items() if mark == "JSON"])
"""Flags of JSON objects; a file of `--config` may have mappings for them."""

BRIEF = frozenset(
    (
        *(
            "model",
            "tokenizer",
            "dtype",
            "max_model_len",
            "max_num_seqs",
            "scheduler",
            "tensor_parallel_size",
        ),
        *(
            "pipeline_parallel_size",
            "config",
            "host",
            "port",
            "api_key_file",
            "served_model_name",
            "chat_template",
        ),
    )
)
"""The settings of an engine and a server in the short help."""
