"""Checks of the names and values of parameters, with a suggestion for a misspelt one.

Flags, arguments of Python and `--config` files share these checks.
"""

import dataclasses
import difflib
import errno
import functools
import importlib
import importlib.util
import json
import logging
import operator
import os
import re
import stat
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

from orca_jax.values.errors import ConfigError, RequestError, reason_of

VALUE_ALIASES: Mapping[str, str] = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
"""Values accepted in place of others, as in vLLM."""

MAX_ADAPTER_NAME = 256  # characters

logger = logging.getLogger(__name__)

_SYNONYMS: Mapping[str, str] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "block_size": "page_size",
}
_NEGATIVE = re.compile(r"(--)?(no|disable|without)[-_]")
_LEAST_LIKENESS = 0.6  # difflib's own default: one wrong letter in three
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def structured_form(params: object) -> tuple[Any, Any]:
    """Return kind and value of a constraint in the form of vLLM's `StructuredOutputsParams`: one field of it."""
    fields = params if isinstance(params, Mapping) else getattr(params, "__dict__", {})
    values = {name: value for name, value in fields.items() if value and not name.startswith("_")}
    name, value = next(iter(values.items()), ("", None))
    if len(values) == 1 and name == "json_object":
        return name, ""
    if len(values) == 1 and name in ("regex", "grammar"):
        return name, value
    if len(values) == 1 and name in ("json", "choice"):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"json": "json_schema"}.get(name, name), text
    known = "json, regex, choice, grammar or json_object"
    message = (
        f"structured_outputs must have exactly one of {known}; it has {', '.join(values) or 'none'}"
    )
    raise RequestError(message, param="structured_outputs")


REFUSED_SAMPLING: Mapping[str, str] = {
    **dict.fromkeys(("best_of", "early_stopping", "length_penalty", "use_beam_search"), "there is no beam search"),
    **dict.fromkeys(("guided_decoding",), "give structured_outputs"),
    **dict.fromkeys(("extra_args", "logits_processors"), "code of a plug-in is not loaded"),
    **dict.fromkeys(("flat_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"),
                    "log probabilities are by token id, of the most probable tokens"),
    **dict.fromkeys(("output_kind", "output_text_buffer_length", "skip_clone", "stream_interval"),
                    "outputs have all text so far, after each iteration"),
    "skip_reading_prefix_cache": "give another cache_salt to each request",
    "spaces_between_special_tokens": "the text is that of the ids, without more blanks",
    "truncate_prompt_tokens": "shorten the prompt yourself",
    **dict.fromkeys(("repetition_detection", "routed_experts_prompt_start", "thinking_token_budget",
                     "trace_decode_token_ids", "watermarking"), "it is not implemented"),
}  # fmt: skip
"""Arguments of vLLM's `SamplingParams` that are refused, with reasons."""


def closest(name: object, known: Iterable[object]) -> str | None:
    """Return the known name closest to `name`, in any case of the letters, or None if none is close.

    A name is never the opposite of the other: `--no-overlap` is not close to `--overlaps`.
    """
    text = str(name).lower()
    is_negative = _NEGATIVE.match(text) is not None
    names = {
        one.lower(): one
        for one in map(str, known)
        if (_NEGATIVE.match(one.lower()) is not None) == is_negative
    }
    near = difflib.get_close_matches(text, names, 1, _LEAST_LIKENESS)
    if _SYNONYMS.get(text) in names:
        return _SYNONYMS[text]
    return names[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return `; did you mean X?` for the known name closest to `name`, or an empty string if none is close."""
    found = closest(name, known)
    return "" if found is None else f"; did you mean {found}?"


def unknown_name(owner: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an argument unknown to `owner`."""
    hint = did_you_mean(name, known) or f"; the known ones are {', '.join(known)}"
    return f"{owner} has no argument {name!r}{hint}"


def names_checked[T](error: Callable[[str, str], Exception]) -> Callable[[type[T]], type[T]]:
    """Decorate a dataclass: for an unknown argument its constructor raises `error(message, name)`, not TypeError.

    It costs a call per construction, so the values of a request have a base class instead.
    """

    def decorate(kind: type[T]) -> type[T]:
        known = tuple(field.name for field in dataclasses.fields(kind) if field.init)  # type: ignore[arg-type]
        every = frozenset(known)
        init = kind.__init__

        @functools.wraps(init)
        def checked(self: T, *args: Any, **values: Any) -> None:
            if not values.keys() <= every:
                name = next(name for name in values if name not in every)
                raise error(unknown_name(kind.__name__, name, known), name)
            init(self, *args, **values)

        kind.__init__ = checked  # type: ignore[assignment]
        return kind

    return decorate


def check_values(settings: Any) -> None:
    """Convert the fields of a frozen dataclass to their types: a path to a string, a list to a tuple, an alias.

    Raises:
        ConfigError: a value has another type, or is not one of the choices; `param` names the field.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        fitting = _fitting(value, hint)
        if fitting is _UNFIT:
            message = f"{name} must be {_described(hint)}, got {value!r}"
            if isinstance(value, str):
                message += did_you_mean(value, choices(hint))
            raise ConfigError(message, param=name)
        if fitting is not value:
            object.__setattr__(settings, name, fitting)


def require(holds: bool, param: str, what: str) -> None:
    """Raise ConfigError with the message `what`, unless a setting holds."""
    if not holds:
        raise ConfigError(what, param=param)


def is_writable(folder: Path) -> bool:
    """True if this process may make files in a folder."""
    return os.access(
        folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    )


def check_new_file(path: str | Path, param: str) -> None:
    """Check that a file can be written, before the work for its content begins.

    Raises:
        ConfigError: its folder is missing or not writable, or it is a folder itself.
    """
    target = Path(path)
    fault = 0
    if target.is_dir():
        fault = errno.EISDIR
    elif not target.parent.is_dir():
        fault = errno.ENOENT
    elif not target.exists() and not is_writable(target.parent):
        fault = errno.EACCES
    if fault:
        reason = reason_of(OSError(fault, os.strerror(fault)))
        raise ConfigError(f"{str(path)!r} cannot be written: {reason}", param=param)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, and return its descriptor. A pipe does not block, and a device is not read.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError("not a regular file")


def distrust(status: os.stat_result) -> str:
    """Return the reason why a file or a folder must not be used; empty if only this user and root can change it.

    Groups of this process may write: Kubernetes gives a volume to this group (`fsGroup`), with all that is in it.
    """
    return _other_owner(status) or _other_writers(status)


def _other_owner(status: os.stat_result) -> str:
    if status.st_uid in (os.geteuid(), 0):
        return ""
    return f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"


def _other_writers(status: os.stat_result) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "all users can write to it"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getegid(), *os.getgroups()):
        return f"its group {status.st_gid}, to which this process does not belong, can write to it"
    return ""


MAX_DIGITS = 9  # of a number that a stranger wrote; Python refuses to read some longer ones
MAX_NESTING = 64  # objects and lists in each other, in a file of settings
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def whole_number(text: str) -> int | None:
    """Return the number that a text of at most `MAX_DIGITS` digits stands for; None for another text."""
    return int(text) if len(text) <= MAX_DIGITS and text.isdecimal() else None


def json_value(
    text: str,
    parse_constant: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> Any:
    """Return the value of a JSON text that a stranger may have written.

    Every text in it can be encoded, and no recursion over it goes deeper than `MAX_NESTING`.

    Args:
        text: the JSON text.
        parse_constant: that of `json.loads`.
        object_pairs_hook: that of `json.loads`, such as `unique_keys`.

    Raises:
        ValueError: it is not JSON, is nested deeper, or has half of a surrogate pair.
    """
    deeper = f"it is nested deeper than {MAX_NESTING} levels"
    try:
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError(deeper) from None
    has_surrogates = _SURROGATE.search(text) is not None
    parts = [value]
    for _ in range(MAX_NESTING + 1):
        for part in parts:
            if has_surrogates and isinstance(part, str):
                part.encode()  # raises UnicodeEncodeError
        outer = [part for part in parts if isinstance(part, dict | list)]
        if not outer:
            return value
        parts = []
        for each in outer:
            parts += each  # items, or keys of an object
            if isinstance(each, dict):
                parts += each.values()
    raise ValueError(deeper)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; for `object_pairs_hook` of `json.loads`, by which the last of equal keys would win.

    Raises:
        ValueError: a key is listed twice. The error names it.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{short(key)} is listed twice")
        found[key] = value
    return found


def escaped(value: Any) -> Any:
    """Return a value of lists, dicts and texts with each half of a surrogate pair as its escape, such as `\\udc00`.

    Names in files may have halves, which UTF-8 does not have, and the reason of a refusal quotes the names.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list | tuple) else value


def adapter_name_fault(name: str) -> str | None:
    """The reason for which an adapter cannot have this name, or None.

    Metrics join the names of adapters by commas, as vLLM's do.
    """
    if not 1 <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable() or "," in name:
        return f"must be 1 to {MAX_ADAPTER_NAME} printable characters without a comma, got {name[:80]!r}"
    return None


def short(value: object) -> str:
    """Return a value for a message, cut to 50 characters."""
    text = repr(value)
    return text if len(text) <= 50 else f"{text[:50]}..."


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the values listed by the Literals of a type."""
    found: list[Any] = []
    for part in _parts(hint):
        if get_origin(part) is Literal:
            found += get_args(part)
    return tuple(found)


_UNFIT = object()


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fitting(value: Any, hint: Any) -> Any:
    """Return the value as one of the types of the hint, or `_UNFIT`."""
    for part in _parts(hint):
        fitting = _as_part(value, part)
        if fitting is not _UNFIT:
            return fitting
    return _UNFIT


def _as_part(value: Any, part: Any) -> Any:
    if get_origin(part) is Literal:
        return _as_choice(value, get_args(part))
    if get_origin(part) is tuple:
        if not isinstance(value, list | tuple):
            return _UNFIT
        items = [_fitting(item, get_args(part)[0]) for item in value]
        if any(item is _UNFIT for item in items):
            return _UNFIT
        return tuple(items)
    if part is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if part is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if part in (int, float):
        return _as_number(value, part)
    return value if isinstance(value, part) else _UNFIT


def _as_choice(value: Any, known: tuple[Any, ...]) -> Any:
    if isinstance(value, str) and VALUE_ALIASES.get(value) in known:
        return VALUE_ALIASES[value]
    if any(value == choice and type(value) is type(choice) for choice in known):
        return value
    return _UNFIT


def _as_number(value: Any, kind: type) -> Any:
    """Return a number as `kind`. A boolean is not a number; an integer of another library is one."""
    if isinstance(value, bool):
        return _UNFIT
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    if kind is float and isinstance(value, float):
        return value
    return _UNFIT


def _described(hint: Any) -> str:
    listed = ", ".join(map(str, choices(hint)))
    if listed:
        return f"one of {listed}"
    part = next(part for part in _parts(hint) if part is not type(None))
    if get_origin(part) is tuple:
        return f"a list, each item {_WORDS[get_args(part)[0]]}"
    words = _WORDS.get(part, f"of type {getattr(part, '__name__', part)}")
    return f"{words} or None" if type(None) in _parts(hint) else words


def is_class_name(name: str | None) -> bool:
    """Return True for MODULE:CLASS or FILE.py:CLASS."""
    return name is not None and ":" in name


def check_known_or_class(name: str, setting: str, known: Sequence[str]) -> None:
    """Refuse a name that is not known and does not name a class.

    Raises:
        ConfigError: `param` is the setting.
    """
    if name not in known and not is_class_name(name):
        message = f"{setting} must be one of {', '.join(known)}, or FILE.py:CLASS, got {name!r}"
        raise ConfigError(message + did_you_mean(name, known), param=setting)


@functools.cache
def load_class(name: str, setting: str) -> type[Any]:
    """Return the class of a name; its module is imported.

    Args:
        name: MODULE:CLASS or FILE.py:CLASS.
        setting: named by errors.

    Raises:
        ConfigError: there is no such module or class, or the import fails.
    """
    place, _, path = name.rpartition(":")
    if not place or not path:
        raise ConfigError(
            f"{setting} must be MODULE:CLASS or FILE.py:CLASS, got {name!r}", param=setting
        )
    load = _module_of_file if place.endswith(".py") else _module
    module = load(place, setting)
    try:
        found: Any = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise _not_loaded(setting, f"{place} has no class {path} at its top") from None
    if not isinstance(found, type):
        raise _not_loaded(setting, f"{name} is not a class")
    return found


def first_line(error: BaseException) -> str:
    """Return the kind and the first line of an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _module(name: str, setting: str) -> types.ModuleType:
    try:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None and spec.has_location:
            _check_code(Path(str(spec.origin)), setting)
        return importlib.import_module(name)
    except (ConfigError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            problem = f"there is no module {name}; start in its folder, or give FILE.py:CLASS"
            raise _not_loaded(setting, problem) from None
        raise _not_loaded(setting, f"{name} cannot be imported: {first_line(error)}") from error
    except BaseException as error:  # a module may end its process too
        raise _not_loaded(setting, f"{name} cannot be imported: {first_line(error)}") from error


def _module_of_file(place: str, setting: str) -> types.ModuleType:
    path = Path(place)
    name = f"orca_jax_{setting}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    _check_code(path, setting)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may end its process too
        del sys.modules[name]
        raise _not_loaded(setting, f"{path} cannot be imported: {first_line(error)}") from error
    return module


def _check_code(path: Path, setting: str) -> None:
    """Refuse code that is not in a file, or that other users can write. Warn if another user owns the file.

    Raises:
        ConfigError: `param` is the setting.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise _not_loaded(setting, f"{path} is not a file") from None
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise _not_loaded(setting, f"{short(str(path))} cannot be read: {reason}") from None
    if not stat.S_ISREG(status.st_mode):
        raise _not_loaded(setting, f"{path} is not a file")
    if writers := _other_writers(status):
        raise _not_loaded(setting, f"{path} is code, and {writers}; run: chmod go-w {path}")
    if _other_owner(status):
        logger.warning(
            "%s: %s belongs to user %d, whose code now runs as user %d",
            setting,
            path,
            status.st_uid,
            os.geteuid(),
        )


def _not_loaded(setting: str, problem: str) -> ConfigError:
    return ConfigError(f"{setting}: {problem}", param=setting)
