"""Command-line flags derived from the fields of dataclasses, for every program that builds an engine."""

import argparse
import dataclasses
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from orca_jax.config import EngineConfig

HELP: Mapping[str, str] = {
    "model": 'what to serve: "demo", a directory, or "preset:<name>"',
    "tokenizer": 'a directory, a tokenizer.json, or "byte"; default: the model\'s own',
    "load_format": "what the weights are; dummy makes random ones",
    "dtype": "of weights and activations",
    "seed": "of random weights, and of requests that bring no seed",
    "max_model_len": "prompt and generated tokens of one request; default: what the model can",
    "max_num_seqs": "requests in one iteration (the paper's max_bs)",
    "scheduler": "iteration-level after the paper (orca), with a token budget (chunked), or the paper's baseline",
    "scheduling_policy": "chunked: who comes first: arrival, priority, tenants' shares, deadline, or predicted length",
    "length_predictor": 'who says how long a request runs: "bound" (max_tokens), "quantiles", "demo", or a directory',
    "overlap": "chunked: select the next iteration while one runs",
    "check_in_intervals": "chunked without overlap: the device repeats iterations by itself, and the host looks at "
    "medium and long requests every K1 and K2 of them",
    "enable_prefix_caching": "chunked: begin with the pages of requests whose prompts begin alike",
    "n_workers": "iterations in flight (the paper's n_workers)",
    "n_slots": "tokens of K and V that may be reserved at once (the paper's n_slots); default: what memory holds",
    "tensor_parallel_size": "devices that share every layer; default: what the model divides into",
    "page_size": "tokens of K and V that are allocated together",
    "num_pages": "pages of K and V; default: what memory holds",
    "gpu_memory_utilization": "share of an accelerator's memory for weights and K and V, in (0, 1]",
    "kv_cache_dtype": "of K and V",
    "max_num_batched_tokens": "tokens in one launch, the largest shape that is compiled; chunked: in one iteration",
    "compile_cache": 'directory of compiled programs; "auto" is in the user\'s cache, "none" keeps none',
    "strict_compile": "fail on a compilation after start-up instead of counting it",
    "attention_implementation": "attention kernel; default: the backend's best",
    "trace_file": "append every arrival, iteration and end, without text, for python -m orca_jax.timeline",
    "progress": "show bars on standard error while loading and compiling",
}
ALIASES: Mapping[str, tuple[str, ...]] = {"tensor_parallel_size": ("-tp",), "page_size": ("--block-size",)}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def human_int(text: str) -> int:
    """`4096`, `4k` (4000) or `4K` (4096), as vLLM reads them; `1.5k` is fine where the result is whole."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer such as 4096, 4k or 4K")
    value = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def add_engine_args(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add a flag for every field of `EngineConfig`; `defaults` override the fields' own."""
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        flags = [flag_of(field.name), *ALIASES.get(field.name, ())]
        default = defaults.get(field.name, field.default)
        shown = "" if default is None else f" (default: {default})"
        options: dict[str, Any] = {"dest": field.name, "default": default, "help": HELP[field.name] + shown}
        group.add_argument(*flags, **options, **options_for(hints[field.name]))


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The `EngineConfig` that the flags describe."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if values["compile_cache"] == "none":
        values["compile_cache"] = None
    return EngineConfig(**values)


def add_field_args(parser: argparse.ArgumentParser, kind: type, fields: Iterable[dataclasses.Field[Any]]) -> None:
    """Add a flag for each of these fields of `kind`, whose metadata have its group and what `--help` says of it."""
    hints = get_type_hints(kind)
    groups: dict[str, Callable[..., argparse.Action]] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group).add_argument
        shown = "" if field.default in (None, "", ()) else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + shown
        options = options_for(hints[field.name])
        if options.get("type") is float:
            options["metavar"] = "SECONDS"
        groups[group](flag_of(field.name), default=field.default, help=text, **options)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def options_for(hint: Any) -> dict[str, Any]:
    """How argparse reads a type. `X | None` is read as X, since None can only be the default; a tuple takes several."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    parts = tuple(part for part in parts if part is not type(None))
    if all(get_origin(part) is Literal for part in parts):
        choices = [choice for part in parts for choice in get_args(part)]
        return {"choices": choices, "type": type(choices[0])}
    (kind,) = parts
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    several: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        kind, several = get_args(kind)[0], {"nargs": "+"}
    return {"type": human_int if kind is int else kind, "metavar": {int: "N", float: "X"}.get(kind, "NAME"), **several}
