"""The self-test of attention kernels, through its real process: fake kernels that are right, wrong, or worse."""

import dataclasses
import importlib.metadata
import sys
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from orca_jax.assembly import engine, self_test
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.devices import Host
from orca_jax.assembly.self_test import (
    Outcome,
    SelfTest,
    has_accelerator_support,
    try_implementations,
)
from orca_jax.assembly.support import Facts, Moment
from orca_jax.exec import memory
from orca_jax.kernels.ragged_attention.self_test import Trial, choose
from orca_jax.model.describe import read_model_config
from orca_jax.values.config import EngineConfig
from tests.covering import slow

TRIAL = Trial(
    num_heads=2, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32", page_dtype="float32"
)

# A process like the real one, on a CPU, whose first implementation is a module of this text.
PROCESS = """
import sys, types
from orca_jax.kernels.backend import Backend
from orca_jax.kernels.ragged_attention import api, self_test, xla

def attend(*args, **options):
    out = xla.attend(*args, **options)
    {body}
    return out

sys.modules["fake"] = types.SimpleNamespace(refusal=lambda q, pages: None, attend=attend)
api.BACKENDS = (Backend("fake", "fake"), *(b for b in api.BACKENDS if b.name == "xla"))
sys.exit(self_test.main(sys.argv, needs_test=lambda device: True))
"""
BODIES = {
    "ok": "pass",
    "wrong": "out = out + 0.5",
    "error": "raise RuntimeError('no such instruction')",
    # its own limit ends it, as if time had passed
    "hang": "import signal; signal.alarm(1); signal.pause()",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes compile without most of LLVM's work."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for the programs of the processes, which have most of them in common."""
    return str(tmp_path_factory.mktemp("programs"))


LATENTS = dataclasses.replace(TRIAL, has_values=False)


def outcome_of(body: str, cache: str, trial: Trial = TRIAL) -> Outcome:
    return try_implementations(trial, cache, (sys.executable, "-c", PROCESS.format(body=body)))


@pytest.mark.slow
def test_a_right_kernel_stays(cache: str, caplog: pytest.LogCaptureFixture) -> None:
    assert outcome_of(BODIES["ok"], cache) == Outcome((SelfTest("fake", "ok"),), None)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        ("wrong", "increments: attention differs from XLA's by 0.5"),
        slow("error", "RuntimeError: no such instruction"),
        slow("hang", "no result after 120 s"),
        ("crash", "SIGSEGV"),
    ],
)
def test_a_bad_kernel_is_replaced_with_one_warning(
    result: str, detail: str, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = outcome_of(BODIES[result], cache)
    (test,) = found.tests
    assert (test.implementation, test.result) == ("fake", result)
    assert detail in test.detail
    assert found.implementation == "xla"
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"'fake' ({result}: " in warning
    assert "'xla' is used instead" in warning


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("out = out.at[0].add(0.5)", "wrong"),
        *(slow(BODIES[name], name) for name in BODIES),
    ],
)
def test_kernels_of_latents(body: str, result: str, cache: str) -> None:
    (test,) = outcome_of(body, cache, LATENTS).tests
    assert test.result == result


def test_latents_have_kernels_of_their_own() -> None:
    tpu = Mock(jax.Device, platform="tpu", device_kind="TPU v6 lite", compute_capability="")
    trial = dataclasses.replace(LATENTS, page_size=128)
    assert choose(trial, tpu) == "tpu_latents"
    assert choose(dataclasses.replace(trial, failed=("tpu_latents",)), tpu) == "xla"


def test_a_process_without_end_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    code = """
import time
print('{"implementation": "fake", "is_plain": false, "plain_instead": "xla"}', flush=True)
time.sleep(1000)
"""
    found = try_implementations(
        dataclasses.replace(TRIAL, seconds=3), None, (sys.executable, "-c", code)
    )
    assert found == Outcome((SelfTest("fake", "hang", "no result after 3 s"),), "xla")


def test_no_folder_for_temporary_files_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only root may have none."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    code = """print('{"implementation": "a", "is_plain": false, "result": "ok", "detail": ""}')"""
    assert try_implementations(TRIAL, None, (sys.executable, "-c", code)) == Outcome(
        (SelfTest("a", "ok"),)
    )


def test_the_next_kernel_is_tested_too() -> None:
    """The first process fails, the second is told so, and finds that its kernel is right."""
    code = """
import json, sys
failed = json.loads(sys.argv[1])["failed"]
print(json.dumps({"implementation": "b" if failed == ["a"] else "a", "is_plain": False, "plain_instead": None}))
print(json.dumps({"result": "ok" if failed else "wrong", "detail": ""}))
"""
    found = try_implementations(TRIAL, None, (sys.executable, "-c", code))
    assert found == Outcome((SelfTest("a", "wrong"), SelfTest("b", "ok")), "b")


@pytest.mark.parametrize(
    ("configured", "failed", "expected"),
    [
        ("xla", (), "xla"),
        ("reference", ("reference",), "xla"),
        (None, (), "xla"),
        (None, ("xla",), "reference"),
        ("magic", (), None),  # the checks of the settings refuse these two
        ("tpu", (), None),
    ],
)
def test_the_configured_implementation_comes_first(
    configured: str | None, failed: tuple[str, ...], expected: str | None
) -> None:
    trial = dataclasses.replace(TRIAL, implementation=configured, failed=failed)
    assert choose(trial, jax.devices()[0]) == expected


def test_a_process_that_cannot_start_jax_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    found = try_implementations(
        TRIAL, None, (sys.executable, "-c", "raise SystemExit('the device is busy')")
    )
    assert found == Outcome((SelfTest("unknown", "error", "the device is busy"),), None)
    assert "they are used untested" in caplog.text


def test_a_tpu_of_several_hosts_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """libtpu in the process of the test would wait for the other hosts until the limit."""
    model = read_model_config("preset:gpt2-tiny")
    pages = choices_of(EngineConfig()).pages
    monkeypatch.setattr(self_test, "has_accelerator_support", lambda platforms: True)
    monkeypatch.setattr(self_test, "try_implementations", lambda *_: pytest.fail("it is tested"))
    monkeypatch.setattr(memory, "has_jax_started", lambda: False)
    monkeypatch.setattr(self_test.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert self_test.try_kernels(model, "bfloat16", 8, pages, None, None, num_hosts=4) == Outcome()


def test_cpus_are_not_tested() -> None:
    assert try_implementations(TRIAL, None) == Outcome()


@pytest.mark.parametrize(
    ("platforms", "plugins", "expected"),
    [
        ("cpu", ["cuda"], False),
        ("cuda,cpu", ["cuda"], True),
        (None, ["cuda"], True),
        (None, [], False),
    ],
)
def test_an_environment_without_plugins_needs_no_process(
    platforms: str | None, plugins: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(self_test.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert has_accelerator_support(platforms) == expected


def build_until_loaded(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Trial], EngineConfig]:
    """The trials of a start on an accelerator whose first kernel fails, and the settings with which it loads."""
    trials: list[Trial] = []
    loaded: list[EngineConfig] = []

    def try_them(trial: Trial, cache: str | None) -> Outcome:
        trials.append(trial)
        return Outcome((SelfTest("gpu", "wrong", "by 0.5"), SelfTest("triton", "ok")), "triton")

    def check(facts: Facts, moment: Moment) -> None:
        if moment == "platform":
            loaded.append(facts.config)
            raise KeyboardInterrupt

    monkeypatch.setattr(self_test, "has_accelerator_support", lambda platforms: True)
    monkeypatch.setattr(self_test, "try_implementations", try_them)
    monkeypatch.setattr(Host, "devices", lambda *arguments: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(engine, "check_support", check)
    monkeypatch.setattr(memory, "has_jax_started", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        engine.build_engine(
            EngineConfig("preset:llama-3-8b", tokenizer="byte", progress=False, **settings)
        )
    return trials, loaded[0]


def test_the_engine_tests_its_own_shapes_and_takes_the_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (trial,), loaded = build_until_loaded(
        {"tensor_parallel_size": 4, "kv_cache_dtype": "float16"}, monkeypatch
    )
    assert trial == Trial(8, 2, 128, 128, "bfloat16", "float16")
    assert loaded.attention_implementation == "triton"


def test_the_test_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, loaded = build_until_loaded({"kernel_self_test": False}, monkeypatch)
    assert not trials
    assert loaded.attention_implementation is None


def test_a_process_that_has_started_jax_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jax.devices()
    monkeypatch.setattr(self_test, "has_accelerator_support", lambda platforms: True)
    monkeypatch.setattr(
        Host, "devices", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        engine.build_engine(EngineConfig("preset:llama-3-8b", tokenizer="byte", progress=False))
    assert "JAX has started" in caplog.text


def test_a_trial_is_one_argument() -> None:
    trial = dataclasses.replace(TRIAL, failed=("gpu",))
    assert Trial.of_json(trial.to_json()) == trial
