"""The table of commands: each row refuses its flag beside some values and takes it beside others."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Values
from typing import Any

import pytest

from orca_jax.flags.needs import FLAG_NEEDS, MTLS, check_needs
from orca_jax.values.errors import ConfigError

FILE = (None, "file")
URL = (None, "http://h")
ENGINES = tuple(
    Values(enable_lora=lora, lora_paths={"a": "folder"}, trace_file="t") for lora in (True, False)
)
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "serve": {
        **dict.fromkeys(
            ("ssl_certfile", "ssl_keyfile", "admin_key_file", "weights_root", "api_key_file"), FILE
        ),
        **dict.fromkeys(MTLS, ("file", None)),
        "uds": FILE,
        "allowed_origins": ((), ("https://a.example",), ("*",)),
        "api_key": ((), ("k",)),
        "kv_events_endpoint": (None, "tcp://*:5557"),
        "engine": ENGINES,
        "names": (("m",), ("a",)),
        "node_rank": (0, 1),
        "nnodes": (1, 2),
    },
    "serve without --nnodes": {},
    "serve with --nnodes": {"cluster_key_file": FILE},
    "batch": {
        "base_url": URL,
        "server": tuple(
            Values(served_model_name=names, engine=ENGINES[0]) for names in ((), ("a",), ("a", "b"))
        ),
        "input": (Path("i"), Path("o"), Path("o.old"), Path("t")),
        "output": (Path("o"), Path("t")),
    },
    "generate, chat": {"base_url": URL},
    "bench online": {"base_url": URL, "is_open": (False, True)},
    "bench online, closed loop": {"base_url": URL, "model": (None, "m")},
    "bench online, open loop": {
        "has_times": (False, True),
        "rates": ((1.0,), (math.inf,), (1.0, 2.0)),
        "num_requests": (1, None),
        "prompts": ("text", "ids"),
        "endpoint": ("completions", "chat"),
        "trace": ("azure",),
    },
    "bench, workloads": {"has_file": (False, True), "trace": ("azure",), "trace_data": FILE},
    "bench schedulers": {"plot": FILE, "load": ((), (1.0,)), "redraw": FILE},
    "timeline, bench burst, bench replay": {"plot": FILE},
    "deploy.ray_serve": {
        "nnodes": (1, 2),
        "replica_cpus": (0, 1),
        "replicas": (1, 2),
        "max_replicas": (None, 2),
    },
    "deploy.ray_serve, replicas": {"replicas": (2,), "max_replicas": (None, 1, 2)},
    "plan": {"most": (0, 8), "tensor": (1, 9), "known": ("v5e",), "devices": ("cpu",)},
}
"""Values of the fields that the rows of a command read; the first one is that of a command without flags."""
NEVER = {
    "serve without --nnodes": {need.flag for need in FLAG_NEEDS["serve without --nnodes"]},
    "deploy.ray_serve": {
        *("uds", "read_timeout", "write_timeout", "kv_events_endpoint"),
        *("node_rank", "master_addr", "master_port", "cluster_key_file"),
    },
}
"""Flags that a command never takes."""


def cases(fields: dict[str, tuple[Any, ...]]) -> Iterator[Values]:
    """The first values with each pair of other values: no row needs more than two of them."""
    first = {name: values[0] for name, values in fields.items()}
    for names in itertools.combinations(fields, min(2, len(fields))):
        for chosen in itertools.product(*(fields[name] for name in names)):
            yield Values(**first | dict(zip(names, chosen, strict=True)))


@pytest.mark.parametrize("command", FLAG_NEEDS)
def test_every_row_is_met_and_unmet_and_the_first_unmet_one_is_named(command: str) -> None:
    rows = FLAG_NEEDS[command]
    seen: set[tuple[int, bool]] = set()
    for values in cases(FIELDS[command]):
        for number, row in enumerate(rows):
            if getattr(values, row.flag, "given") is None:
                continue
            seen.add((number, bool(row.is_met(values))))
            unmet = [each for each in rows if each.flag == row.flag and not each.is_met(values)]
            if not unmet:
                check_needs(command, values, {row.flag})
                continue
            with pytest.raises(ConfigError) as caught:
                check_needs(command, values, {row.flag})
            assert caught.value.param == row.flag
            assert unmet[0].reason.format(f=values) in str(caught.value) and "{" not in str(
                caught.value
            )
    never = {number for number, row in enumerate(rows) if row.flag in NEVER.get(command, ())}
    assert seen == set(itertools.product(range(len(rows)), (True, False))) - {
        (number, True) for number in never
    }


def test_flags_that_were_not_given_are_not_checked() -> None:
    for command in FLAG_NEEDS:
        check_needs(command, Values(), ())
