"""Reads files of public traces: arrivals and lengths of requests, and the prefixes that they share.

Both kinds may have columns or keys with the names of `Urgency`, such as deadline, tenant and priority.

- Azure's LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset, CC-BY 4.0): a CSV file with a
  line per request.
- Mooncake's traces (github.com/kvcache-ai/Mooncake, Apache-2.0): a line of JSON per request. `hash_ids` names the
  blocks of 512 tokens of the prompt; the last block may be partly filled. Equal ids mean equal beginnings.
"""

import csv
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.checks import json_value, open_regular, short
from orca_jax.values.errors import ConfigError, reason_of
from orca_jax.values.request import DEFAULT_URGENCY, Urgency

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens
MOST_TOKENS = 10_000_000  # of a prompt or an answer
# of the fields of `Urgency`, else float
_KINDS: Mapping[str, type] = {"priority": int, "tenant": str, "program": str}


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a file, with scaled lengths."""

    arrival: float  # seconds since an arbitrary moment
    num_input: int
    num_output: int
    # two requests share the tokens of their equal first blocks; empty: shares nothing
    blocks: tuple[int, ...] = ()
    block_size: int = 0  # tokens of a block
    urgency: Urgency = DEFAULT_URGENCY
    # seconds from the arrival to the first and to the last token; None: not recorded
    first_token: float | None = None
    latency: float | None = None

    @property
    def per_token(self) -> float | None:
        """Mean seconds between tokens; None: there are no times, or there is one token."""
        if self.first_token is None or self.latency is None or self.num_output < 2:
            return None
        return (self.latency - self.first_token) / (self.num_output - 1)


def read_azure(
    path: str, num_requests: int | None, scale: float, seconds: float = math.inf
) -> list[RecordedRequest]:
    """Read the first requests of a CSV file of Azure: `num_requests`, or those of the first `seconds`.

    Raises:
        ConfigError: the file cannot be read, is in another format, or has fewer requests.
    """

    def read(line: dict[str, str]) -> RecordedRequest:
        arrival = datetime.fromisoformat(line["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
        num_input = scaled_length(int(line["ContextTokens"]), scale)
        num_output = scaled_length(int(line["GeneratedTokens"]), scale)
        return RecordedRequest(arrival, num_input, num_output, urgency=urgency_of(line))

    with _opened(path) as lines:
        rows = csv.DictReader(lines)
        if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
            raise _wrong(
                path, f"the first line does not name the columns {', '.join(AZURE_COLUMNS)}"
            )
        return _first(path, map(read, rows), num_requests, seconds, first_line=2)


def read_mooncake(
    path: str, num_requests: int | None, scale: float, seconds: float = math.inf
) -> list[RecordedRequest]:
    """Read the first requests of a file of Mooncake: `num_requests`, or those of the first `seconds`.

    Blocks get `512 * scale` tokens, which must be an integer.

    Raises:
        ConfigError: the file cannot be read, is in another format or has fewer requests, or the scale does not fit.
    """
    block = round(min(MOONCAKE_BLOCK * scale, MOST_TOKENS))
    if block < 1 or not math.isclose(block, MOONCAKE_BLOCK * scale):
        raise ConfigError(
            f"length_scale {scale} makes blocks of {MOONCAKE_BLOCK * scale:g} instead of {MOONCAKE_BLOCK} tokens; the "
            f"size must be an integer, for example 16 with a scale of {16 / MOONCAKE_BLOCK}",
            param="length_scale",
        )

    def read(text: str) -> RecordedRequest:
        line = json_value(text)
        length = int(line["input_length"])
        blocks = tuple(map(int, line["hash_ids"]))
        if ceil_div(length, MOONCAKE_BLOCK) != len(blocks):
            raise ValueError(f"{length} tokens are not {len(blocks)} blocks")
        full, rest = divmod(length, MOONCAKE_BLOCK)
        num_input = max(1, full * block + math.ceil(rest * scale))  # never beyond its last block
        num_output = scaled_length(int(line["output_length"]), scale)
        arrival = float(line["timestamp"]) / 1e3
        if not math.isfinite(arrival):
            raise ValueError(f"timestamp must be a number of milliseconds, got {line['timestamp']}")
        return RecordedRequest(arrival, num_input, num_output, blocks, block, urgency_of(line))

    with _opened(path) as lines:
        return _first(path, map(read, lines), num_requests, seconds, first_line=1)


def _first(
    path: str,
    records: Iterator[RecordedRequest],
    count: int | None,
    seconds: float,
    first_line: int,
) -> list[RecordedRequest]:
    """Return the first `count` records within `seconds` of the first one; None: all of them.

    They must be in the order of time, and parsing one may raise an error.
    """
    taken: list[RecordedRequest] = []
    try:
        for record in islice(records, count):
            if taken and record.arrival < taken[-1].arrival:
                raise ValueError("the request arrives before the previous one")
            if taken and record.arrival - taken[0].arrival > seconds:
                return taken
            taken.append(record)
    except KeyError as error:
        raise _wrong(path, f"line {first_line + len(taken)} has no {error.args[0]}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise _wrong(path, f"line {first_line + len(taken)}: {error}") from error
    if not taken:
        raise _wrong(path, "it has no requests")
    if count is not None and len(taken) < count and math.isinf(seconds):
        message = f"{path} has only {len(taken)} of {count} requests; lower num_requests"
        raise ConfigError(message, param="num_requests")
    return taken


@contextmanager
def _opened(path: str) -> Iterator[Iterator[str]]:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8", newline="") as lines:
            yield lines
    except OSError as error:
        raise ConfigError(
            f"trace_data {path!r} cannot be read: {reason_of(error)}", param="trace_data"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _wrong(path, str(error)) from error


def _wrong(path: str, why: str) -> ConfigError:
    message = f"trace_data {path!r} is not a file of this trace: {why}; azure has CSV files, mooncake has JSON lines"
    return ConfigError(message, param="trace_data")


def scaled_length(length: int, scale: float) -> int:
    """Return the tokens of a scaled length, at least 1. Raises ValueError."""
    if length < 0:
        raise ValueError(f"a length must not be negative, got {length}")
    if length * scale > MOST_TOKENS:
        raise ValueError(f"a length must be at most {MOST_TOKENS} tokens, got {length * scale:.0f}")
    return max(1, round(length * scale))


def urgency_of(line: Mapping[str, Any]) -> Urgency:
    """The fields of `Urgency` in a line, which are texts in a CSV file. Raises ValueError."""
    given = {each.name: line.get(each.name) for each in fields(Urgency)}
    return Urgency(
        **{name: _value(name, value) for name, value in given.items() if value not in (None, "")}
    )


def _value(name: str, value: Any) -> Any:
    kind = _KINDS.get(name, float)
    is_fit = isinstance(value, str) or (kind is not str and type(value) in (int, float))
    if not is_fit or (kind is int and isinstance(value, float)):
        raise ValueError(
            f"{name} must be {'a text' if kind is str else 'a number'}, got {short(value)}"
        )
    return kind(value)
