"""Reads files of public traces: arrivals and lengths of requests, and the prefixes that they share.

- Azure's LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset, CC-BY 4.0): a CSV file with a
  line per request.
- Mooncake's traces (github.com/kvcache-ai/Mooncake, Apache-2.0): a line of JSON per request. `hash_ids` names the
  blocks of 512 tokens of the prompt; the last block may be partly filled. Equal ids mean equal beginnings.
"""

import csv
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from orca_jax.errors import ConfigError, reason_of

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a file, with scaled lengths."""

    arrival: float  # seconds since an arbitrary moment
    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()  # two requests share the tokens of their equal first blocks; empty: shares nothing
    block_size: int = 0  # tokens of a block


def read_azure(path: str, num_requests: int | None, scale: float, seconds: float = math.inf) -> list[RecordedRequest]:
    """Read the first requests of a CSV file of Azure: `num_requests`, or those of the first `seconds`.

    Raises:
        ConfigError: the file cannot be read, is in another format, or has fewer requests.
    """

    def read(line: dict[str, str]) -> RecordedRequest:
        arrival = datetime.fromisoformat(line["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
        return RecordedRequest(
            arrival, _scaled(int(line["ContextTokens"]), scale), _scaled(int(line["GeneratedTokens"]), scale)
        )

    with _opened(path) as lines:
        rows = csv.DictReader(lines)
        if not set(AZURE_COLUMNS) <= set(rows.fieldnames or ()):
            raise _wrong(path, f"the first line does not name the columns {', '.join(AZURE_COLUMNS)}")
        return _first(path, map(read, rows), num_requests, seconds, first_line=2)


def read_mooncake(
    path: str, num_requests: int | None, scale: float, seconds: float = math.inf
) -> list[RecordedRequest]:
    """Read the first requests of a file of Mooncake: `num_requests`, or those of the first `seconds`.

    Blocks get `512 * scale` tokens, which must be an integer.

    Raises:
        ConfigError: the file cannot be read, is in another format or has fewer requests, or the scale does not fit.
    """
    block = round(MOONCAKE_BLOCK * scale)
    if block < 1 or not math.isclose(block, MOONCAKE_BLOCK * scale):
        raise ConfigError(
            f"length_scale {scale} makes blocks of {MOONCAKE_BLOCK * scale:g} instead of {MOONCAKE_BLOCK} tokens; the "
            f"size must be an integer, for example 16 with a scale of {16 / MOONCAKE_BLOCK}",
            param="length_scale",
        )

    def read(text: str) -> RecordedRequest:
        line = json.loads(text)
        length, blocks = int(line["input_length"]), tuple(map(int, line["hash_ids"]))
        if -(-length // MOONCAKE_BLOCK) != len(blocks):
            raise ValueError(f"{length} tokens are not {len(blocks)} blocks")
        full, rest = divmod(length, MOONCAKE_BLOCK)
        num_input = max(1, full * block + math.ceil(rest * scale))  # never beyond its last block
        num_output = _scaled(int(line["output_length"]), scale)
        return RecordedRequest(float(line["timestamp"]) / 1e3, num_input, num_output, blocks, block)

    with _opened(path) as lines:
        return _first(path, map(read, lines), num_requests, seconds, first_line=1)


def _first(
    path: str, records: Iterator[RecordedRequest], count: int | None, seconds: float, first_line: int
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
    except (ValueError, TypeError) as error:
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
        with open(path, encoding="utf-8", newline="") as lines:
            yield lines
    except OSError as error:
        raise ConfigError(f"trace_data {path!r} cannot be read: {reason_of(error)}", param="trace_data") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _wrong(path, str(error)) from error


def _wrong(path: str, why: str) -> ConfigError:
    message = f"trace_data {path!r} is not a file of this trace: {why}; azure has CSV files, mooncake has JSON lines"
    return ConfigError(message, param="trace_data")


def _scaled(length: int, scale: float) -> int:
    if length < 0:
        raise ValueError(f"a length must not be negative, got {length}")
    return max(1, round(length * scale))
