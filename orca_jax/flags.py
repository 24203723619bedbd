"""Command-line flags derived from the fields of dataclasses, for every program that builds an engine."""

import argparse
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from orca_jax.checks import VALUE_ALIASES, did_you_mean
from orca_jax.config import GPU_MEMORY_UTILIZATION, MAX_LORA_RANK, MAX_LORAS, EngineConfig
from orca_jax.errors import ConfigError

HELP: Mapping[str, str] = {
    "model": 'model to run: "demo", a directory, a name of the Hugging Face Hub (ORG/NAME), a GGUF file, or '
    '"preset:<name>"',
    "revision": "branch, tag or commit of a model of the Hub; default: its default branch",
    "download_dir": "folder for models of the Hub; default: the cache of huggingface_hub (HF_HOME)",
    "tokenizer": 'directory, tokenizer.json, name of the Hub, or "byte"; default: the tokenizer of the model',
    "decoder": "class of your own decoder, MODULE:CLASS or FILE.py:CLASS; its code is run (docs/own_models.md)",
    "load_format": "checkpoint format; auto: Orbax if there is params/, else safetensors; dummy: random weights",
    "dtype": "type of weights and activations",
    "quantization": "store the weights of linear layers and vocabulary in 8 or 4 bits (default: as in config.json)",
    "seed": "seed of random weights, and of requests without a seed",
    "max_model_len": "most tokens of one request, prompt and output together; default: the model's limit",
    "max_num_seqs": "most requests in one iteration (the paper's max_bs)",
    "scheduler": "orca: iteration-level scheduling as in the paper; chunked: the same with a token budget; "
    "request_level: the paper's baseline",
    "scheduling_policy": "chunked: order of the waiting requests: by arrival (fcfs), priority, fair shares of tenants, "
    "deadline, or predicted length (shortest)",
    "length_predictor": "prediction of output lengths: bound (a request's max_tokens), quantiles (of past requests), "
    "demo (the bundled ranker), or the directory of a ranker (default: bound); for --scheduling-policy shortest and "
    "--check-in-intervals",
    "overlap": "chunked: select the next iteration while one runs (default for chunked)",
    "check_in_intervals": "chunked, with --no-overlap: repeat an iteration on the device; the host checks medium "
    "requests every K1 iterations and long ones every K2",
    "enable_prefix_caching": "chunked: reuse the KV cache pages of earlier prompts with the same beginning "
    "(default for chunked)",
    "n_workers": "iterations in flight (the paper's n_workers); default: one for each pipeline stage",
    "n_slots": "orca and request_level: most tokens of KV cache reserved at once (the paper's n_slots); "
    "default: what fits in memory",
    "tensor_parallel_size": "devices that share every layer; default: 1, and on a CPU as many as the model allows",
    "pipeline_parallel_size": "stages of the model, each with its part of the layers on --tensor-parallel-size devices",
    "page_size": "tokens of one KV cache page",
    "num_pages": "pages of the KV cache; default: what fits in memory",
    "gpu_memory_utilization": "fraction of each accelerator's whole memory for weights and KV cache, above 0 and at "
    f"most 1 (default: {GPU_MEMORY_UTILIZATION})",
    "kv_cache_dtype": "type of the KV cache",
    "max_num_batched_tokens": "most tokens in one launch, the largest compiled shape; chunked: in one iteration, at "
    "least --max-num-seqs (default: by --itl-target-ms)",
    "itl_target_ms": "chunked: most milliseconds between two tokens of a request; the token budget is the largest that "
    "keeps it in a measurement at start (default: 250 on a CPU, 100 on accelerators)",
    "compile_cache": 'directory for compiled programs; "auto": in the user\'s cache, "none": no cache',
    "strict_compile": "raise an error on a compilation after start-up, instead of counting it",
    "attention_implementation": "attention kernel; default: the best one for the device",
    "kernel_self_test": "on accelerators: compare the attention kernels with plain XLA at start, and replace those "
    "that fail",
    "enable_lora": "serve low-rank adapters (LoRA) beside the model; docs/adapters.md",
    "max_loras": f"most adapters in one iteration (default: {MAX_LORAS})",
    "max_lora_rank": f"largest rank of an adapter (default: {MAX_LORA_RANK})",
    "max_cpu_loras": "most adapters loaded at once, in the memory of the host (default: 4 times --max-loras)",
    "lora_modules": "adapters to load at start, NAME=PATH each: directories in the format of PEFT",
    "trace_file": "append a timeline of arrivals, iterations and ends to this file, without text or token ids; "
    "python -m orca_jax.timeline shows it",
    "progress": "show progress bars on standard error while loading and compiling",
}
ALIASES: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "page_size": ("--block-size",),
}

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(
        ("api_key_file", "chat_template", "cluster_key_file", "mtls_ca_file", "mtls_cert_file", "mtls_key_file"), "FILE"
    ),
    **dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "trace_file"), "FILE"),
    **dict.fromkeys(("base_url", "otlp_traces_endpoint"), "URL"),
    **dict.fromkeys(("compile_cache", "download_dir", "generation_config"), "DIR"),
    **dict.fromkeys(("root_path", "tokenizer", "uds"), "PATH"),
    "allowed_origins": "ORIGIN",
    "api_key": "KEY",
    "body": "JSON",
    "decoder": "CLASS",
    "host": "ADDRESS",
    "master_addr": "ADDRESS",
    "model": "MODEL",
}
"""The placeholders that `--help` shows for values; a flag that is not listed has one by its type."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


COMMAND = "orca-jax"

BRIEF = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "scheduler",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "config",
        "host",
        "port",
        "api_key_file",
        "served_model_name",
        "chat_template",
    }
)
"""The settings of an engine and a server in the short help."""


def program(name: str) -> str:
    """Return the name of the part `name` on the command line: of the command `orca-jax`, or of `python -m`."""
    return f"{COMMAND} {name}" if Path(sys.argv[0]).name == COMMAND else f"python -m orca_jax.{name}"


class _Help(argparse.Action):
    """Prints the short help; with a value, all flags, those of a group, or those with a word in their names."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        assert isinstance(parser, FlagParser)
        parser.print_help_of(values)
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """A parser without abbreviations. It suggests flags and values for misspelt ones.

    Args:
        args: of `argparse.ArgumentParser`.
        brief: the settings in the short help, in addition to positional arguments; None: `--help` shows all flags.
        options: of `argparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, brief: Collection[str] | None = None, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "add_help": brief is None, **options})
        self._words: Sequence[str] = ()
        self._brief = brief
        if brief is not None:
            text = "show this help; --help=all: all flags; --help=WORD: the flags of a group, or with a word in a name"
            self.add_argument(
                "-h", "--help", action=_Help, nargs="?", metavar="WORD", default=argparse.SUPPRESS, help=text
            )

    def print_help_of(self, word: str | None) -> None:
        """Print the short help, or the help of the flags that `word` selects. Ends the process if there are none."""
        shown = [action for action in self._actions if self._is_selected(action, word)]
        if not shown:
            groups = ", ".join(group.title or "" for group in self._action_groups[2:])
            self.error(f"argument --help: no flag and no group has the word {word!r}; groups: {groups}, all")
        texts = [(action, action.help) for action in self._actions if action not in shown]
        for action, _ in texts:
            action.help = argparse.SUPPRESS
        try:
            self.print_help()
        finally:
            for action, text in texts:
                action.help = text

    def _is_selected(self, action: argparse.Action, word: str | None) -> bool:
        if word == "all":
            return True
        if word is None:
            return not action.option_strings or action.dest in (*(self._brief or ()), "help")
        group = next((group.title for group in self._action_groups if action in group._group_actions), None)
        return word == group or any(word.strip("-").replace("_", "-") in flag for flag in action.option_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; keep the words for the message of an error."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message with a suggestion, and end the process with code 2."""
        super().error(self.hinted(message))

    def hinted(self, message: str) -> str:
        """Return the message of an error with suggestions for misspelt flags."""
        has_misspelt = message.startswith(("unrecognized arguments", "the following arguments are required"))
        return message + self._suggestions() if has_misspelt else message

    def given(self, argv: Sequence[str] | None = None) -> frozenset[str]:
        """Return the names of the settings with a flag on the command line; their values may be the defaults."""
        missing = object()
        names = {action.dest: missing for action in self._actions}
        parsed = vars(self.parse_args(argv, argparse.Namespace(**names)))
        return frozenset(name for name, value in parsed.items() if value is not missing)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + did_you_mean(value, action.choices or ())) from None

    def _suggestions(self) -> str:
        known = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = [parser for name, parser in action.choices.items() if name in self._words]
                known += [flag for parser in chosen for flag in parser._option_string_actions]
        words = [word.partition("=")[0] for word in self._words]
        unknown = [word for word in words if word.startswith("--") and word not in known]
        return "".join(hint and f"; {word}: {hint[2:]}" for word in unknown if (hint := did_you_mean(word, known)))


def human_int(text: str) -> int:
    """Read `4096`, `4k` (4000) or `4K` (4096) as vLLM does; `1.5k` is allowed, since the result is an integer.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096, 4k or 4K")
    value = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
    return int(value)


def add_engine_args(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: Any) -> None:
    """Add a flag for every field of `EngineConfig`; `defaults` override those of the fields.

    A program that sets some fields itself leaves them out (`without`): it could not honour their flags.
    """
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in without:
            parser.set_defaults(**{field.name: defaults.get(field.name, field.default)})
            continue
        flags = [flag_of(field.name), *ALIASES.get(field.name, ())]
        default = defaults.get(field.name, field.default)
        shown = "" if default is None else f" (default: {default})"
        options: dict[str, Any] = {"dest": field.name, "default": default, "help": HELP[field.name] + shown}
        group.add_argument(*flags, **options, **options_for(hints[field.name], field.name))


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """Make the `EngineConfig` that the flags describe."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if values["compile_cache"] == "none":
        values["compile_cache"] = None
    return EngineConfig(**values)


def add_field_args(parser: argparse.ArgumentParser, kind: type, fields: Iterable[dataclasses.Field[Any]]) -> None:
    """Add a flag for each of these fields of `kind`; the metadata of a field hold its group and its help text."""
    hints = get_type_hints(kind)
    groups: dict[str, Callable[..., argparse.Action]] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group).add_argument
        shown = "" if field.default in (None, "", ()) else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + shown
        options = options_for(hints[field.name], field.name)
        if options.get("type") is float:
            options["metavar"] = "SECONDS"
        groups[group](flag_of(field.name), default=field.default, help=text, **options)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def flag_message(error: ConfigError) -> str:
    """Return the message of an error, with the flag if the error names one."""
    if error.param is None or error.message.startswith("--"):
        return error.message
    return f"{flag_of(error.param)}: {error.message}"


def options_for(hint: Any, name: str) -> dict[str, Any]:
    """Return argparse's options for the field `name` of a type.

    `X | None` is read as X, since None can only be the default. A tuple takes several values.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    parts = tuple(part for part in parts if part is not type(None))
    if all(get_origin(part) is Literal for part in parts):
        choices = [choice for part in parts for choice in get_args(part)]
        kind = type(choices[0])
        return {"choices": choices, "type": _choice if kind is str else kind}
    (kind,) = parts
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    several: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        kind, several = get_args(kind)[0], {"nargs": "+"}
    metavar = METAVARS.get(name, {int: "N", float: "X"}.get(kind, "NAME"))
    return {"type": human_int if kind is int else kind, "metavar": metavar, **several}


def _choice(text: str) -> str:
    return VALUE_ALIASES.get(text, text)
