"""Faults of classes from outside: each becomes an error that names the class, or is mended at the door."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from orca_jax.link.loop import EngineStatus
from orca_jax.link.wire import encode
from orca_jax.policy import API, Decision, PolicyView, RequestView
from orca_jax.policy.errors import Interruption, PolicyError
from orca_jax.policy.predictor import PolicyPredictor
from orca_jax.values import checks
from orca_jax.values.checks import load_class
from orca_jax.values.errors import ConfigError
from tests.policy.test_policies import Base, deciding, fitting, lab_of, tokens_of


def test_sizes_of_numpy_become_numbers_that_can_be_sent() -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        jobs = fitting(view, [*view.residents, *view.waiting])
        return Decision([(job, np.int64(size)) for job, size in jobs])

    lab = lab_of(deciding(decide))
    lab.add("r0", 5, 6)
    lab.run()
    assert lab.tokens["r0"] == tokens_of(5, 6)
    assert type(lab.engine.stats.scheduled_tokens) is int
    status = EngineStatus()
    status.watch(lab.engine)
    status.enter("serving")
    status.sample(lab.engine)
    assert encode(status.heartbeat())
    assert all(
        type(choice.num_tokens) is int for choices in lab.scheduler.seen for choice in choices
    )


def test_a_wake_after_of_numpy_becomes_a_float() -> None:
    slept: list[float] = []

    def decide(policy: Base, view: PolicyView) -> Decision:
        if slept:
            return Decision(fitting(view, [*view.residents, *view.waiting]))
        return Decision([], (), np.float32(0.25))

    lab = lab_of(deciding(decide))
    lab.engine._sleep = slept.append
    lab.add("r0", 4, 2)
    lab.run()
    assert slept and lab.tokens["r0"] == tokens_of(4, 2)


@pytest.mark.parametrize("value", [math.nan, -0.5, math.inf, 1e9, "1", 5.001, [1]])
def test_a_wake_after_that_is_no_time_names_the_policy(value: Any) -> None:
    lab = lab_of(deciding(lambda policy, view: Decision([], (), value)))
    lab.add("r0", 4, 2)
    with pytest.raises(PolicyError, match=r"^Tried: wake_after must be from 0 to 5 seconds, got"):
        lab.step()


class Ends(BaseException):
    """An exception that no `except Exception` catches."""


@pytest.mark.parametrize("method", ["decide", "started", "ended"])
@pytest.mark.parametrize("kind", [SystemExit, Ends])
def test_every_end_of_a_method_names_the_policy(method: str, kind: type[BaseException]) -> None:
    def end(*values: Any) -> Any:
        raise kind("enough")

    policy = deciding(Base.decide)
    setattr(policy, method, end)
    lab = lab_of(policy)
    lab.add("r0", 4, 2)
    with pytest.raises(
        PolicyError, match=rf"^Tried: {method} raised {kind.__name__}: enough at line \d+"
    ):
        for turn in range(8):
            lab.step()
            lab.add(f"n{turn}", 2, 1)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interruption])
def test_an_interruption_from_outside_passes(kind: type[BaseException]) -> None:
    def decide(policy: Base, view: PolicyView) -> Decision:
        raise kind

    lab = lab_of(deciding(decide))
    lab.add("r0", 4, 2)
    with pytest.raises(kind):
        lab.step()


class Predicts:
    """A predictor; tests change its methods."""

    api: ClassVar[int] = API
    refresh: ClassVar[int | None] = None

    def predict(self, job: RequestView, ids: Any) -> Any:
        return 3

    def observe(self, job: RequestView, length: int) -> None:
        pass


def _raise(*values: Any) -> Any:
    raise KeyError("no model")


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        ("predict", _raise, r"predict raised KeyError: 'no model' at line \d+"),
        ("predict", lambda job, ids: None, "predict returned None instead of a number of tokens"),
        (
            "predict",
            lambda job, ids: math.nan,
            "predict returned nan instead of a number of tokens",
        ),
        ("predict", lambda job, ids: "7", "predict returned '7' instead of a number of tokens"),
        ("observe", _raise, r"observe raised KeyError: 'no model' at line \d+"),
    ],
)
def test_a_fault_of_a_predictor_names_it(
    method: str, does: Callable[..., Any], message: str
) -> None:
    predictor = Predicts()
    setattr(predictor, method, does)
    lab = lab_of(Base())
    lab.pool.predictor = PolicyPredictor(predictor, "Guess")
    with pytest.raises(PolicyError, match=f"^Guess: {message}"):
        lab.add("r0", 4, 2)
        lab.run()


def test_a_prediction_of_numpy_is_a_number(tmp_path: Path) -> None:
    predictor = Predicts()
    predictor.predict = lambda job, ids: np.float32(2.0)  # type: ignore[method-assign]
    lab = lab_of(Base())
    lab.pool.predictor = PolicyPredictor(predictor, "Guess")
    lab.add("r0", 4, 2)
    assert [type(request.predicted_output) for request in lab.pool] == [float]


@pytest.mark.parametrize(
    "setting", ["scheduler", "scheduling_policy", "length_predictor", "decoder"]
)
@pytest.mark.parametrize(
    "line", ["raise SystemExit(0)", "import sys; sys.exit()", "raise BaseException('no')"]
)
def test_a_module_that_ends_at_its_import_is_refused_by_its_setting(
    tmp_path: Path, setting: str, line: str
) -> None:
    path = tmp_path / "ends.py"
    path.write_text(f"{line}\n")
    with pytest.raises(
        ConfigError, match=f"^{setting}: .*ends.py cannot be imported: (SystemExit|BaseException)"
    ) as it:
        load_class(f"{path}:Mine", setting)
    assert it.value.param == setting
    assert not [name for name in sys.modules if name.endswith("_ends")]


def test_a_path_of_5000_characters_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler: .*File name too long") as it:
        load_class(f"/tmp/{'a' * 5000}.py:Mine", "scheduler")
    assert it.value.param == "scheduler" and len(str(it.value)) < 300


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open.py"
    path.write_text("class Mine: pass\n")
    path.chmod(0o666)
    with pytest.raises(
        ConfigError,
        match=r"^scheduler: .*open.py is code, and all users can write to it; run: chmod",
    ):
        load_class(f"{path}:Mine", "scheduler")
    path.chmod(0o644)
    assert load_class(f"{path}:Mine", "scheduler").__name__ == "Mine"


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away"
)
def test_a_file_of_another_user_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "theirs.py"
    path.write_text("class Mine: pass\n")
    os.chown(path, 12345, 12345)
    path.chmod(0o644)
    load_class(f"{path}:Mine", "scheduler")
    assert "theirs.py belongs to user 12345, whose code now runs as user 0" in caplog.text
    assert checks.load_class is load_class


def test_the_wire_has_no_numbers_of_other_libraries() -> None:
    """The cause of a silent end: msgspec refuses them."""
    with pytest.raises(TypeError, match=r"numpy\.int64"):
        msgspec.msgpack.encode(np.int64(1))
