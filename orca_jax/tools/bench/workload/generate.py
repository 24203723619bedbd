"""Makes workloads, and the flags that describe them."""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

from orca_jax.flags import add_number
from orca_jax.flags.needs import check_needs
from orca_jax.tools.bench.workload.files import RecordedRequest, read_azure, read_mooncake
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import DEFAULT_URGENCY, Urgency


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload. It generates exactly `num_output` tokens, since end tokens are ignored."""

    arrival: float  # seconds after the start
    prompt_ids: tuple[int, ...]
    num_output: int
    urgency: Urgency = DEFAULT_URGENCY  # of a file


class TraceReader(Protocol):
    """Reads the first requests of a file."""

    def __call__(
        self, path: str, num_requests: int | None, scale: float, seconds: float = math.inf
    ) -> list[RecordedRequest]:
        """Return them in the order of arrival. Raises ConfigError."""


MOST_REQUESTS = 1_000_000
LONG_SHARE = 1 / 8  # of the prompts of "orca-long"
READERS: dict[str, TraceReader] = {"azure": read_azure, "mooncake": read_mooncake}
WORKLOADS = ("orca", "orca-long", *READERS)


def make_workload(
    name: str,
    *,
    num_requests: int | None,
    vocab_size: int,
    seed: int,
    rate: float | None,
    has_recorded_times: bool = False,
    max_model_len: int | None = None,
    data: str | None = None,
    length_scale: float = 1.0,
    seconds: float | None = None,
) -> list[WorkloadRequest]:
    """Make a workload by name. Prompts are random ids.

    "orca" is the workload of the paper (section 6.2): 32 to 512 input tokens and 1 to 128 output tokens, both uniform,
    with Poisson arrivals. In "orca-long" one prompt in eight has 768 to 896 tokens instead.

    "azure" and "mooncake" take lengths and arrivals from the first requests of a file of public traces. Outputs are cut
    to half of `max_model_len`, then prompts to the rest of it. Prompts of "mooncake" share the blocks named equally in
    the file.

    Args:
        name: one of `WORKLOADS`.
        num_requests: number of requests; None: all of a file within `seconds`.
        vocab_size: ids are below it.
        seed: seed of ids, lengths and arrivals; the lengths do not depend on the rate.
        rate: requests per second; None: all at once. Arrivals of a file are
                stretched evenly to this rate, so bursts remain.
        has_recorded_times: requests of a file arrive as they did, without a rate.
        max_model_len: most tokens of one request, prompt and output together; None: no limit.
        data: the file of "azure" or "mooncake".
        length_scale: factor for the lengths of a file.
        seconds: leave out the requests of a file that arrived later after its first one.

    Raises:
        ConfigError: the name is unknown, a number is out of range, or the file is wrong; `param` names the setting.
    """
    if name not in WORKLOADS:
        raise ConfigError(
            f"trace must be one of {', '.join(WORKLOADS)}, got {name!r}", param="trace"
        )
    if num_requests is not None and not 1 <= num_requests <= MOST_REQUESTS:
        message = f"num_requests must be from 1 to {MOST_REQUESTS}, got {num_requests}"
        raise ConfigError(message, param="num_requests")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate must be above 0, got {rate}", param="rate")
    if not length_scale > 0:
        raise ConfigError(f"length_scale must be above 0, got {length_scale}", param="length_scale")
    used = {
        "trace": name,
        "trace_data": data,
        "length_scale": None if length_scale == 1 else length_scale,
    }
    given = [flag for flag, value in used.items() if value is not None]
    check_needs("bench, workloads", SimpleNamespace(**used, has_file=name in READERS), given)
    if name in READERS:
        assert data is not None, "checked"
        records = READERS[name](
            data, num_requests, length_scale, math.inf if seconds is None else seconds
        )
        stretch = 1.0 if has_recorded_times else 0.0 if rate is None else _stretch(records, rate)
        return _from_records(
            records, stretch, vocab_size=vocab_size, seed=seed, max_model_len=max_model_len
        )
    assert num_requests is not None, "only files have an end"
    return _synthetic(name, num_requests, vocab_size, seed, rate)


def _synthetic(
    name: str, num_requests: int, vocab_size: int, seed: int, rate: float | None
) -> list[WorkloadRequest]:
    lengths, ids, gaps = (
        random.Random(f"{name}-{part}-{seed}") for part in ("lengths", "ids", "gaps")
    )
    long_share = LONG_SHARE if name == "orca-long" else 0.0
    workload, now = [], 0.0
    for _ in range(num_requests):
        num_input = lengths.randint(32, 512)
        num_output = lengths.randint(1, 128)
        if long_share and lengths.random() < long_share:
            num_input = lengths.randint(768, 896)
        prompt = tuple(ids.choices(range(vocab_size), k=num_input))
        workload.append(WorkloadRequest(now, prompt, num_output))
        now += gaps.expovariate(rate) if rate else 0.0
    return workload


def _from_records(
    records: Sequence[RecordedRequest],
    stretch: float,
    *,
    vocab_size: int,
    seed: int,
    max_model_len: int | None,
) -> list[WorkloadRequest]:
    vocabulary = range(vocab_size)
    workload = []
    for index, record in enumerate(records):
        num_input = record.num_input
        num_output = record.num_output
        if max_model_len is not None:
            num_output = min(num_output, max(1, max_model_len // 2))
            num_input = min(num_input, max_model_len - num_output)
        ids: list[int] = []
        for block in record.blocks:
            if len(ids) >= num_input:
                break
            ids += random.Random(f"block-{seed}-{block}").choices(vocabulary, k=record.block_size)
        ids += random.Random(f"prompt-{seed}-{index}").choices(
            vocabulary, k=max(0, num_input - len(ids))
        )
        arrival = (record.arrival - records[0].arrival) * stretch
        workload.append(
            WorkloadRequest(arrival, tuple(ids[:num_input]), num_output, record.urgency)
        )
    return workload


def _stretch(records: Sequence[RecordedRequest], rate: float) -> float:
    """Return the factor of time with which the last of n requests arrives (n - 1) / rate seconds after the first."""
    if math.isinf(rate):
        return 0.0
    span = records[-1].arrival - records[0].arrival
    if span <= 0:
        raise ConfigError(
            f"the first {len(records)} requests of the file arrive at the same time, so they cannot be stretched to a "
            "rate; raise num_requests or leave out the rate",
            param="rate",
        )
    return (len(records) - 1) / rate / span


def add_workload_args(parser: argparse.ArgumentParser, workload: str = "orca") -> None:
    """Add the flags that describe a workload."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace", choices=WORKLOADS, default=workload, help=f"workload (default: {workload})"
    )
    add_number(group, "--num-requests", 64, "number of requests")
    group.add_argument(
        "--trace-data", metavar="FILE", help="file of --trace azure (CSV) or mooncake (JSON lines)"
    )
    add_number(group, "--length-scale", 1.0, "factor for the lengths of a file", metavar="X")


def workload_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the values of these flags for the line of JSON."""
    return {
        name: getattr(args, name)
        for name in ("trace", "num_requests", "trace_data", "length_scale")
    }


def workload_from_args(
    args: argparse.Namespace, *, vocab_size: int, max_model_len: int, rate: float | None
) -> list[WorkloadRequest]:
    """Make the workload that the flags describe, for a model; `args.seed` is a flag of the engine.

    Raises:
        ConfigError: as in `make_workload`.
    """
    return make_workload(
        args.trace,
        num_requests=args.num_requests,
        vocab_size=vocab_size,
        seed=args.seed,
        rate=rate,
        max_model_len=max_model_len,
        data=args.trace_data,
        length_scale=args.length_scale,
    )
