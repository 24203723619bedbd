"""Flags of a model and of sampling for `generate` and `chat`, and the source of their texts."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orca_jax.cli.remote import RemoteModel
from orca_jax.cli.source import LocalModel, TextSource
from orca_jax.errors import RequestError
from orca_jax.flags import COMMAND, FlagParser, add_engine_args, engine_config_from_args, human_int
from orca_jax.request import SamplingParams

_REMOTE = "the server at --base-url"


def text_parser(name: str, usage: str, description: str, max_tokens: int) -> FlagParser:
    """Return a parser with the flags of sampling, of a server and of an engine for one request at a time."""
    brief = {"base_url", "max_tokens", "temperature", "top_p", "stop", "system", "json", "model", "tokenizer", "dtype"}
    name = f"{COMMAND} {name}"
    parser = FlagParser(name, f"{name} {usage}", brief=brief, description=description)
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=human_int, default=max_tokens, metavar="N", help=f"most tokens (default: {max_tokens})"
    )
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 for the most probable tokens; default: that of the model"
    )
    group.add_argument("--top-p", type=float, metavar="X", help="probability of the tokens to draw from")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="seed of the draws, for the same text again")
    group.add_argument("--stop", nargs="+", default=(), metavar="TEXT", help="strings that end the text")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", metavar="URL", help="use an OpenAI-compatible server instead of an engine in this process"
    )
    server.add_argument("--api-key-file", metavar="FILE", help="file with the API key of the server")
    add_engine_args(parser, progress=True, max_num_seqs=1)
    return parser


def params_of(args: argparse.Namespace, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
    """Return the parameters that the flags describe. Raises RequestError.

    Args:
        args: the parsed flags.
        defaults: of the model, by field of `SamplingParams`.
        fields: further fields.
    """
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p}
    given |= {"seed": args.sampling_seed, "stop": tuple(args.stop)}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}, **fields}
    return SamplingParams(**values)


@contextlib.contextmanager
def text_source(args: argparse.Namespace, given: frozenset[str]) -> Iterator[TextSource]:
    """Open the model that the flags describe: an engine in this process, or a server.

    Args:
        args: the parsed flags.
        given: names of the flags on the command line.

    Raises:
        ConfigError: a setting is wrong.
        RequestError: a flag of the engine was given for a server, or one of the server without it.
    """
    config = engine_config_from_args(args)
    if args.base_url is None:
        if "api_key_file" in given:
            raise RequestError("api_key_file needs --base-url", param="api_key_file")
        with LocalModel(config) as model:
            yield model
        return
    fields = {field.name for field in dataclasses.fields(config)} - {"model"}
    if useless := sorted(fields & given):
        raise RequestError(f"{useless[0]} has no effect on {_REMOTE}; leave it out", param=useless[0])
    name = config.model if "model" in given else None
    with RemoteModel(args.base_url, name, args.api_key_file) as remote:
        yield remote


def read_flags(parser: FlagParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, frozenset[str]]:
    """Parse the flags, and return the names of those given."""
    return parser.parse_args(argv), parser.given(argv)
