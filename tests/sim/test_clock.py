"""The clock model: its text, the start of its groups, and the refused settings."""

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.sim.clock import WRAP_SECONDS, Clock, age_of
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams


def test_it_spells_the_time_at_which_a_group_began() -> None:
    times = iter([12.3456, 1000.5])
    clock = Clock(0.25, now=lambda: next(times))
    text = "".join(chr(clock("a", length, 0)) for length in range(3, 24))
    assert text == "..... 0125956 0007500"


def test_age_survives_the_wrap() -> None:
    assert age_of("0000010", WRAP_SECONDS + 0.501) == pytest.approx(0.5)
    assert age_of("9999990", WRAP_SECONDS + 0.001) == pytest.approx(0.002)


def test_requests_do_not_share_a_group() -> None:
    times = iter([1.0, 2.0])
    clock = Clock(0.0, now=lambda: next(times))
    assert [clock("a", 8, 0), clock("b", 16, 0)] == [ord(" "), ord(" ")]
    assert [chr(clock("a", 11, 0)), chr(clock("b", 19, 0))] == ["1", "2"], "10000 and 20000 ticks"


def test_an_engine_serves_it() -> None:
    engine = build_engine(
        EngineConfig(model="preset:clock-1", max_num_seqs=2, max_model_len=64)
    ).engine
    engine.add_request("r", [65] * 8, SamplingParams(max_tokens=16))
    ids = [token for update in _run(engine) for token in update.new_ids]
    groups = bytes(ids).decode().split(" ")
    assert (
        groups[0] == ""
        and all(len(group) == 7 and group.isdecimal() for group in groups[1:])
        and len(groups) == 3
    )


def _run(engine):  # type: ignore[no-untyped-def]
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize(
    "model",
    [
        "preset:clock-",
        "preset:clock-x",
        "preset:clock-0",
        "preset:clock-99999",
        "preset:clock-" + "9" * 5000,
    ],
)
def test_a_clock_without_a_pace_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="milliseconds") as error:
        build_engine(EngineConfig(model=model))
    assert error.value.param == "model"
