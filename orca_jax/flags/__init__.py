"""Command-line flags, the `--config` file, and the errors of programs on one line."""

from orca_jax.flags.engine import (
    add_engine_args,
    add_field_args,
    add_model_word,
    add_setting_args,
    engine_config_from_args,
    human_int,
)
from orca_jax.flags.numbers import add_number
from orca_jax.flags.parser import FlagParser
from orca_jax.flags.program import (
    COMMAND,
    DEBUG,
    EXIT_USAGE,
    flag_message,
    flag_of,
    program,
    run_program,
)
from orca_jax.flags.texts import BRIEF, help_of

__all__ = [
    "BRIEF",
    "COMMAND",
    "DEBUG",
    "EXIT_USAGE",
    "FlagParser",
    "add_engine_args",
    "add_field_args",
    "add_model_word",
    "add_number",
    "add_setting_args",
    "engine_config_from_args",
    "flag_message",
    "flag_of",
    "help_of",
    "human_int",
    "program",
    "run_program",
]
