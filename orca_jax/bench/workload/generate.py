"""Workloads: what arrives when, and how long it is."""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_jax.bench.workload.files import RecordedRequest, read_azure, read_mooncake
from orca_jax.errors import ConfigError


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a trace. It generates exactly `num_output` tokens, since no end token counts."""

    arrival: float  # seconds after the start
    prompt_ids: tuple[int, ...]
    num_output: int


LONG_SHARE = 1 / 8  # of the prompts of "orca-long"
READERS: dict[str, Callable[[str, int, float], list[RecordedRequest]]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
}
WORKLOADS = ("orca", "orca-long", *READERS)


def make_workload(
    name: str,
    *,
    num_requests: int,
    vocab_size: int,
    seed: int,
    rate: float | None,
    max_model_len: int | None = None,
    data: str | None = None,
    length_scale: float = 1.0,
) -> list[WorkloadRequest]:
    """A trace by name. Random ids stand for text.

    "orca" is the paper's (section 6.2): input uniform in 32..512 tokens, output uniform in 1..128, arrivals
    Poisson. In "orca-long" one prompt in eight has 768..896 tokens instead.

    "azure" and "mooncake" read a file of public traces: the lengths and arrivals of its first requests. Requests
    longer than `max_model_len` lose the ends of their prompts, after outputs were cut to half of it. Prompts of
    "mooncake" begin alike exactly where the file says so.

    Args:
        name: one of `WORKLOADS`.
        num_requests: how many.
        vocab_size: ids are below it.
        seed: same seed, same trace; the lengths do not depend on the rate.
        rate: requests per second; None: all at once. A file's arrivals are stretched evenly to it, bursts and all.
        max_model_len: prompt and output of one request at most; None: as they are.
        data: the file, for a trace that is read from one.
        length_scale: what the lengths of a file are multiplied by.

    Raises:
        ConfigError: an unknown name, a number that cannot be, or a file that is not what it should be.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown trace {name!r}; known: {', '.join(WORKLOADS)}", param="trace")
    if num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests}", param="num_requests")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate must be above 0, got {rate}", param="rate")
    if not length_scale > 0:
        raise ConfigError(f"length_scale must be above 0, got {length_scale}", param="length_scale")
    if name in READERS:
        if data is None:
            raise ConfigError(f"trace {name} is read from a file; give trace_data", param="trace_data")
        records = READERS[name](data, num_requests, length_scale)
        return _from_records(records, vocab_size=vocab_size, seed=seed, rate=rate, max_model_len=max_model_len)
    if data is not None or length_scale != 1:
        raise ConfigError(f"trace {name} is made up; leave out trace_data and length_scale", param="trace_data")
    return _synthetic(name, num_requests, vocab_size, seed, rate)


def _synthetic(name: str, num_requests: int, vocab_size: int, seed: int, rate: float | None) -> list[WorkloadRequest]:
    lengths, ids, gaps = (random.Random(f"{name}-{part}-{seed}") for part in ("lengths", "ids", "gaps"))
    long_share = LONG_SHARE if name == "orca-long" else 0.0
    trace, now = [], 0.0
    for _ in range(num_requests):
        num_input, num_output = lengths.randint(32, 512), lengths.randint(1, 128)
        if long_share and lengths.random() < long_share:
            num_input = lengths.randint(768, 896)
        prompt = tuple(ids.choices(range(vocab_size), k=num_input))
        trace.append(WorkloadRequest(now, prompt, num_output))
        now += gaps.expovariate(rate) if rate else 0.0
    return trace


def _from_records(
    records: Sequence[RecordedRequest], *, vocab_size: int, seed: int, rate: float | None, max_model_len: int | None
) -> list[WorkloadRequest]:
    stretch = 0.0 if rate is None else _stretch(records, rate)
    vocabulary = range(vocab_size)
    trace = []
    for index, record in enumerate(records):
        num_input, num_output = record.num_input, record.num_output
        if max_model_len is not None:
            num_output = min(num_output, max(1, max_model_len // 2))
            num_input = min(num_input, max_model_len - num_output)
        ids: list[int] = []
        for block in record.blocks:
            if len(ids) >= num_input:
                break
            ids += random.Random(f"block-{seed}-{block}").choices(vocabulary, k=record.block_size)
        ids += random.Random(f"prompt-{seed}-{index}").choices(vocabulary, k=max(0, num_input - len(ids)))
        arrival = (record.arrival - records[0].arrival) * stretch
        trace.append(WorkloadRequest(arrival, tuple(ids[:num_input]), num_output))
    return trace


def _stretch(records: Sequence[RecordedRequest], rate: float) -> float:
    """What to multiply times by, so that the last of n requests arrives (n - 1) / rate seconds after the first."""
    span = records[-1].arrival - records[0].arrival
    if span <= 0:
        raise ConfigError(
            f"the first {len(records)} requests of the file come at one moment, so that they have no rate to change; "
            "raise num_requests or leave the rate out",
            param="rate",
        )
    return (len(records) - 1) / rate / span


def add_workload_args(parser: argparse.ArgumentParser, trace: str = "orca") -> None:
    """Flags that name a trace."""
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", choices=WORKLOADS, default=trace, help=f"workload (default: {trace})")
    group.add_argument("--num-requests", type=int, default=64, metavar="N", help="requests (default: 64)")
    group.add_argument("--trace-data", metavar="PATH", help="the file of --trace azure (CSV) or mooncake (JSON lines)")
    group.add_argument(
        "--length-scale", type=float, default=1.0, metavar="X", help="multiply a file's lengths by this (default: 1.0)"
    )


def workload_settings(args: argparse.Namespace) -> dict[str, object]:
    """What `add_workload_args` was told, for the line of JSON."""
    return {name: getattr(args, name) for name in ("trace", "num_requests", "trace_data", "length_scale")}


def workload_from_args(
    args: argparse.Namespace, *, vocab_size: int, max_model_len: int, rate: float | None
) -> list[WorkloadRequest]:
    """The trace that the flags describe, for a model; `args.seed` is the engine's flag.

    Raises:
        ConfigError: as `make_workload`.
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
