"""Flags of a model and of sampling for `generate` and `chat`, and the source of their texts."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from orca_jax.cli.source import LocalModel, TextSource
from orca_jax.flags import COMMAND, FlagParser, add_engine_args, engine_config_from_args, human_int
from orca_jax.flags.needs import check_needs
from orca_jax.values.request import SamplingParams


def text_parser(
    name: str, usage: str, description: str, max_tokens: int, *, has_word: bool = False
) -> FlagParser:
    """Return a parser with the flags of sampling, of a server and of an engine for one request at a time.

    `has_word`: the model may be a word.
    """
    brief = {
        "raw",
        "base_url",
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "system",
        "json",
        "model",
        "tokenizer",
        "dtype",
    }
    name = f"{COMMAND} {name}"
    parser = FlagParser(name, f"{name} {usage}", brief=brief, description=description)
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=human_int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens (default: {max_tokens})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 for the most probable tokens; default: that of the model",
    )
    group.add_argument(
        "--top-p", type=float, metavar="X", help="probability of the tokens to draw from"
    )
    group.add_argument(
        "--sampling-seed", type=int, metavar="N", help="seed of the draws, for the same text again"
    )
    group.add_argument(
        "--stop", nargs="+", default=(), metavar="TEXT", help="strings that end the text"
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        metavar="URL",
        help="use an OpenAI-compatible server instead of an engine in this process",
    )
    server.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key of the server"
    )
    add_engine_args(parser, has_word=has_word, progress=True, max_num_seqs=1)
    return parser


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the flags give. Raises RequestError."""
    fields = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p}
    fields |= {"seed": args.sampling_seed, "stop": args.stop or None}
    chosen = {name: value for name, value in fields.items() if value is not None}
    SamplingParams(**chosen)  # checks them
    return chosen


@contextlib.contextmanager
def text_source(parser: FlagParser, argv: Sequence[str] | None) -> Iterator[TextSource]:
    """Open the model that the flags describe: an engine in this process, or a server.

    Args:
        parser: the parser of `text_parser`.
        argv: the flags; None for those of this process.

    Raises:
        ConfigError: a setting is wrong, a flag of the engine was given for a server, or one of the server without it.
        RequestError: a flag of sampling is wrong.
    """
    args = parser.parse_args(argv)
    chosen = parser.given(argv)
    sampling = sampling_of(args)
    config = engine_config_from_args(args)
    check_needs("generate, chat", args, chosen)
    if args.base_url is None:
        with LocalModel(config, sampling) as model:
            yield model
        return
    name = config.model if "model" in chosen else None
    from orca_jax.cli.remote import RemoteModel  # it imports much, and help comes at once

    with RemoteModel(args.base_url, name, args.api_key_file, sampling) as remote:
        yield remote
