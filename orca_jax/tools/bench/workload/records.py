"""Reads what serving tools have recorded, as requests of a load.

`FORMS` is the table of forms, and `read_recording` the place where a file's form is recognised:

- vLLM: a line of JSON per request with `queued_ts`, or results of `vllm bench serve --save-detailed`, one per line.
- guidellm: the report of `guidellm run --output kind=json`.
- inference-perf: `per_request_lifecycle_metrics.json`.
- OpenTelemetry: lines of OTLP in JSON, as a collector's file exporter writes them. Spans with `gen_ai` tokens count.
- Timelines of this engine (`--trace-file`), and the traces that `files.py` reads.

Requests without a token are left out, for example those that failed.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import IO, Any, NamedTuple

from orca_jax.timeline.measure import token_times
from orca_jax.timeline.read import load_timeline
from orca_jax.tools.bench.workload.entries import LineError, NumberedValue, elements, lines
from orca_jax.tools.bench.workload.files import (
    RecordedRequest,
    read_azure,
    read_mooncake,
    scaled_length,
    urgency_of,
)
from orca_jax.values.checks import open_regular, require
from orca_jax.values.errors import ConfigError, OrcaError, reason_of
from orca_jax.values.request import Urgency

HEAD = 2**16
"""Characters at the beginning of a file that show its form."""
MOST_ENTRIES = 1_000_000
TIMES = 1e12
"""Seconds that are refused, since 1970 or another moment."""


class RecordedLoad(NamedTuple):
    """The requests of a file in the order of arrival."""

    form: str
    requests: list[RecordedRequest]
    num_left_out: int


class RecordForm(NamedTuple):
    """A form of files.

    Attributes:
        mark: what the beginning of each file of it has.
        read: returns requests in any order, and how many were left out.
    """

    mark: str
    read: Callable[[str], tuple[list[RecordedRequest], int]]


def read_recording(path: str) -> RecordedLoad:
    """Read a recording in one of the forms of `FORMS`.

    Raises:
        ConfigError: the file cannot be read, is in no known form, or an entry is wrong; `param` is "recorded".
    """
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as file:
            head = file.read(HEAD)
        name = next((name for name, form in FORMS.items() if re.search(form.mark, head)), None)
        if name is None:
            raise ConfigError(
                f"recorded {path!r} is in no known form; known are {', '.join(FORMS)}", "recorded"
            )
        requests, num_left_out = FORMS[name].read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise ConfigError(f"recorded {path!r} cannot be read: {why}", "recorded") from error
    if not requests:
        raise ConfigError(f"recorded {path!r} has no request with a token", "recorded")
    requests.sort(key=lambda request: request.arrival)
    return RecordedLoad(name, requests, num_left_out)


def _read(
    entries: Callable[[IO[str]], Iterator[NumberedValue]],
    parse: Callable[[Any], Iterable[RecordedRequest | None]],
    path: str,
) -> tuple[list[RecordedRequest], int]:
    """The requests of a file by entries, and how many had no token."""
    with os.fdopen(open_regular(path), encoding="utf-8") as file:
        found = list(_parsed(path, entries(file), parse))
    requests = [request for request in found if request is not None]
    return requests, len(found) - len(requests)


def _parsed(
    path: str,
    values: Iterator[NumberedValue],
    parse: Callable[[Any], Iterable[RecordedRequest | None]],
) -> Iterator[RecordedRequest | None]:
    """Yield the requests of all entries. Raises ConfigError."""
    line = 1
    count = 0
    try:
        while entry := next(values, None):
            line = entry[0]
            for request in parse(entry[1]):
                count += 1
                yield request
            require(count <= MOST_ENTRIES, "recorded", f"more than {MOST_ENTRIES} requests")
    except LineError as error:
        raise _wrong(path, error.line, error.reason) from error
    except KeyError as error:
        raise _wrong(path, line, f"there is no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, OrcaError) as error:
        raise _wrong(path, line, str(error)) from error


def _wrong(path: str, line: int, reason: str) -> ConfigError:
    return ConfigError(f"recorded {path!r}: line {line}: {reason}", "recorded")


def _request(
    arrival: Any,
    num_input: Any,
    num_output: Any,
    times: tuple[Any, Any] = (None, None),
    urgency: Urgency | None = None,
) -> RecordedRequest | None:
    """A request with checked numbers; None if it has no token of its prompt or answer.

    Args:
        arrival: seconds.
        num_input: tokens of the prompt.
        num_output: generated tokens.
        times: seconds from the arrival to the first and to the last token.
        urgency: what schedulers read.
    """
    if num_input in (0, None) or num_output in (0, None):
        return None
    first_token, latency = (None if each is None else _seconds(each) for each in times)
    if first_token is not None and first_token < 0:
        raise ValueError(f"the first token is {-first_token:g} s before the arrival")
    if latency is not None and latency < (first_token or 0):
        raise ValueError("the last token is before the first one or the arrival")
    return RecordedRequest(
        _seconds(arrival),
        _length(num_input),
        _length(num_output),
        urgency=urgency or Urgency(),
        first_token=first_token,
        latency=latency,
    )


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not -TIMES < value < TIMES:
        raise ValueError(f"a time must be a number of seconds, got {value!r:.80}")
    return float(value)


def _length(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"a length must be a whole number, got {value!r:.80}")
    return scaled_length(value, 1.0)


def _of_vllm(line: Mapping[str, Any]) -> Iterator[RecordedRequest | None]:
    begin = _seconds(line["queued_ts"])
    times = _seconds(line["first_token_ts"]) - begin, _seconds(line["last_token_ts"]) - begin
    yield _request(begin, line["input_toks"], line["output_toks"], times, urgency_of(line))


def _of_vllm_bench(line: Mapping[str, Any]) -> Iterator[RecordedRequest | None]:
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls", "errors")
    for begin, num_input, num_output, first, gaps, error in zip(
        *[line[name] for name in names], strict=True
    ):
        latency = _seconds(first) + sum(map(_seconds, gaps))
        yield None if error else _request(begin, num_input, num_output, (first, latency))


def _of_guidellm(entry: Mapping[str, Any]) -> Iterator[RecordedRequest | None]:
    first = entry["time_to_first_token_ms"]
    times = None if first is None else _seconds(first) / 1e3, entry["request_latency"]
    program = Urgency(program=str(entry["info"].get("conversation_id") or ""))
    lengths = entry["prompt_tokens"], entry["output_tokens"]
    yield _request(entry["request_start_time"], *lengths, times, program)


def _of_inference_perf(entry: Mapping[str, Any]) -> Iterator[RecordedRequest | None]:
    answer = (entry["info"] or {}).get("response_metrics")
    if entry["error"] is not None or answer is None:
        yield None
        return
    begin = _seconds(entry["start_time"])
    tokens = answer.get("output_token_times") or ()
    first = _seconds(tokens[0]) - begin if tokens else None
    times = first, _seconds(entry["end_time"]) - begin
    num_input = entry["info"]["request_metrics"]["text"]["input_tokens"]
    yield _request(begin, num_input, answer["output_tokens"], times)


def _of_spans(line: Mapping[str, Any]) -> Iterator[RecordedRequest | None]:
    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from filter(None, map(_of_span, scope["spans"]))


def _of_span(span: Mapping[str, Any]) -> RecordedRequest | None:
    """A request of a model; None for another span."""
    given = {
        each["key"]: next(iter(each["value"].values()), None)
        for each in span.get("attributes") or ()
    }

    def first_of(*names: str) -> Any:
        return next((given[name] for name in names if name in given), None)

    usage = "gen_ai.usage."
    lengths = (
        first_of(usage + "input_tokens", usage + "prompt_tokens"),
        first_of(usage + "output_tokens", usage + "completion_tokens"),
    )
    if None in lengths:
        return None
    begin = int(span["startTimeUnixNano"])
    latency = (int(span["endTimeUnixNano"]) - begin) / 1e9
    first = first_of("gen_ai.latency.time_to_first_token", "gen_ai.server.time_to_first_token")
    tenant = first_of("user.id", "enduser.id")
    program = first_of("gen_ai.conversation.id")
    urgency = Urgency(tenant=str(tenant or ""), program=str(program or ""))
    return _request(begin / 1e9, int(lengths[0]), int(lengths[1]), (first, latency), urgency)


def _read_timeline(path: str) -> tuple[list[RecordedRequest], int]:
    """The requests of a timeline; those with equal pages share the beginnings of their prompts."""
    timeline = load_timeline(path)
    times = token_times(timeline)
    size = timeline.head.cache.page_size
    found = []
    for n, each in timeline.arrivals.items():
        end = timeline.ends.get(n)
        if end is None or not end.generated or not times.get(n):
            continue
        urgency = Urgency(each.priority, str(each.tenant or ""), each.deadline)
        first_token = times[n][0] - each.at
        # keyed hashes of the pages, those of the answer included
        pages = tuple(end.pages[: each.prompt // size])
        lengths = each.prompt, end.generated
        found.append(
            RecordedRequest(
                each.at, *lengths, pages, size, urgency, first_token, times[n][-1] - each.at
            )
        )
    return found, len(timeline.arrivals) - len(found)


def _own(read: Callable[[str], tuple[list[RecordedRequest], int]], path: str) -> Any:
    """Call a reader of files with another flag; its errors name this one."""
    try:
        return read(path)
    except ConfigError as error:
        message = error.message.removeprefix(f"trace_data {path!r} ")
        raise ConfigError(f"recorded {path!r}: {message}", "recorded") from error


FORMS: Mapping[str, RecordForm] = {
    "Azure": RecordForm(
        r"\A[^\n]*ContextTokens", partial(_own, lambda path: (read_azure(path, None, 1.0), 0))
    ),
    "Mooncake": RecordForm(
        r'\A\s*\{[^\n]*"input_length"',
        partial(_own, lambda path: (read_mooncake(path, None, 1.0), 0)),
    ),
    "vLLM": RecordForm(r'\A\s*\{[^\n]*"queued_ts"', partial(_read, lines, _of_vllm)),
    "vLLM's bench": RecordForm(
        r'\A\s*\{[^\n]*"endpoint_type"', partial(_read, lines, _of_vllm_bench)
    ),
    "OpenTelemetry": RecordForm(r'\A\s*\{\s*"resourceSpans"', partial(_read, lines, _of_spans)),
    "timeline": RecordForm(r'\A\s*\{\s*"head"', partial(_own, _read_timeline)),
    "guidellm": RecordForm(
        r'\A\s*\{[\s\S]*"guidellm_version"',
        partial(_read, partial(elements, r'"successful"\s*:\s*\['), _of_guidellm),
    ),
    "inference-perf": RecordForm(
        r'\A\s*\[\s*(\{\s*"start_time"|\])',
        partial(_read, partial(elements, r"\A\s*\["), _of_inference_perf),
    ),
}
"""The forms that are read, by their names in reports."""
