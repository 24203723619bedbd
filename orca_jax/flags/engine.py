"""Flags derived from the fields of dataclasses, for every program that builds an engine."""

import argparse
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from orca_jax.flags.parser import FlagParser
from orca_jax.flags.program import flag_of
from orca_jax.flags.texts import ALIASES, METAVARS, help_of
from orca_jax.values.checks import VALUE_ALIASES
from orca_jax.values.config import EngineConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def human_int(text: str) -> int:
    """Read `4096`, `4k` (4000) or `4K` (4096) as vLLM does; `1.5k` is allowed, since the result is an integer.

    Raises:
        argparse.ArgumentTypeError: the text is not a number in this form.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    # A float is not exact: 1.001 times 1000 is less than 1001.
    value = None if match is None else Fraction(match[1]) * _UNITS[match[2]]
    if value is None or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096, 4k or 4K")
    return int(value)


def add_engine_args(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    has_word: bool = False,
    **defaults: Any,
) -> None:
    """Add a flag for every field of `EngineConfig`.

    A `FlagParser` also gets `--config`, and takes vLLM's flags that have no effect here.

    Args:
        parser: gets the flags.
        without: fields that the program sets itself: it could not honour their flags.
        has_word: the model may be a word of the command line instead of `--model`, as in `serve MODEL`.
        defaults: override those of the fields.
    """
    if isinstance(parser, FlagParser):
        parser.add_config_flag()
        parser.takes_vllm = True
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in without:
            parser.set_defaults(**{field.name: defaults.get(field.name, field.default)})
            continue
        flags = [flag_of(field.name), *ALIASES.get(field.name, ())]
        default = defaults.get(field.name, field.default)
        shown = "" if default is None else f" (default: {default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "default": default,
            "help": help_of(field.name) + shown,
        }
        place = group
        if has_word and field.name == "model":
            place = group.add_mutually_exclusive_group()
            add_model_word(place)
        place.add_argument(*flags, **options, **options_for(hints[field.name], field.name))


def add_model_word(parser: argparse._ActionsContainer) -> None:
    """Add the word MODEL, which stands for `--model MODEL`, to a group with this flag alone."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model"
    )


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """Make the `EngineConfig` that the flags describe; what "auto" stands for is said on standard error."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if values["model"] == "auto":
        from orca_jax.helpers.bundled import chosen_model  # other models start sooner

        values["model"], remark = chosen_model()
        print(remark, file=sys.stderr)
    if values["compile_cache"] == "none":
        values["compile_cache"] = None
    return EngineConfig(**values)


def add_field_args(
    parser: argparse.ArgumentParser, kind: type, fields: Iterable[dataclasses.Field[Any]]
) -> None:
    """Add a flag for each of these fields of `kind`; the metadata of a field hold its group."""
    hints = get_type_hints(kind)
    groups: dict[str, Callable[..., argparse.Action]] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group).add_argument
        shown = "" if field.default in (None, "", ()) else f" (default: {field.default})"
        text = help_of(field.name, kind)
        options = options_for(hints[field.name], field.name)
        if options.get("type") is float:
            options["metavar"] = "SECONDS"
        groups[group](
            flag_of(field.name),
            default=field.default,
            help=text.replace("%", "%%") + shown,
            **options,
        )


def add_setting_args(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add flags of the engine without defaults: a setting that is not given is no attribute."""
    hints = get_type_hints(EngineConfig)
    for name in names:
        options = options_for(hints[name], name)
        parser.add_argument(
            flag_of(name), dest=name, default=argparse.SUPPRESS, help=help_of(name), **options
        )


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
    if dataclasses.is_dataclass(kind):
        return {"type": str, "metavar": METAVARS[name]}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    several: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        several = {"nargs": "+"}
    metavar = METAVARS.get(name, {int: "N", float: "X"}.get(kind, "NAME"))
    return {"type": human_int if kind is int else kind, "metavar": metavar, **several}


def _choice(text: str) -> str:
    return VALUE_ALIASES.get(text, text)
