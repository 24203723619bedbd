"""Flags of a batch run. Its checks are imported after the flags are read, so that help and errors come at once."""

from collections.abc import Sequence
from pathlib import Path

from orca_jax.batch.config import (
    BatchConfig,
    for_throughput,
    model_fields,
    model_names,
    own_fields,
    server_config,
)
from orca_jax.flags import (
    BRIEF,
    FlagParser,
    add_engine_args,
    add_field_args,
    engine_config_from_args,
    program,
)
from orca_jax.server_config import ServerConfig

DESCRIPTION = (
    "Answer a file of requests with an engine in this process or with an OpenAI-compatible server."
)


def parse_args(argv: Sequence[str] | None = None) -> BatchConfig:
    """Parse the flags. For unknown flags or wrong types, argparse ends the process with code 2.

    Raises:
        ConfigError: a value or a combination of values is wrong; `param` names the flag.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    of_model = {name: getattr(args, name) for name in model_names()}
    of_model = {
        name: tuple(value) if isinstance(value, list) else value for name, value in of_model.items()
    }
    own = {field.name: getattr(args, field.name) for field in own_fields()}
    engine = engine_config_from_args(args)
    if args.base_url is None:
        engine = for_throughput(engine)
    config = BatchConfig(args.input, args.output, server_config(engine, **of_model), **own)
    from orca_jax.batch.check import check

    check(config, parser.given(argv))
    return config


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    name = program("batch")
    usage = f"{name} [MODEL] -i INPUT -o OUTPUT [flags]"
    brief = {*BRIEF, "input", "output", "format", "body", "order", "overwrite", "base_url"}
    parser = FlagParser(name, usage, brief=brief, description=DESCRIPTION)
    parser.add_argument(
        "-i",
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="input file with one request per line",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="output file with one answer per line",
    )
    add_field_args(parser, BatchConfig, own_fields())
    add_field_args(parser, ServerConfig, model_fields())
    add_engine_args(parser, has_word=True)
    return parser
