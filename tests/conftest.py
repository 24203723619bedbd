"""Every test runs strict: eight fake CPU devices, no implicit dtype promotion, shapes checked against their types."""

import gc
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network; before huggingface_hub reads it

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.run.records import is_record
from tests.run.rewriting import rewrite_share
from tests.run.server import anyio_backend, idle_server, server
from tests.run.thought import Thought
from tests.run.until import Until

__all__ = ["anyio_backend", "idle_server", "server"]
FAKE_CPU_DEVICES = 8
NUMBERS = frozenset({"embeddings", "exec", "kernels", "lora", "model"})
"""Folders of tests that compare numbers with those of others, and not tokens alone."""
CHECKED_PACKAGES = ("orca_jax.kernels", "orca_jax.model", "orca_jax.exec", "orca_jax.tools.ranker")

# Each run tests properties on the same examples, which depend on the test alone, and neither on the time nor on the
# constants of those modules that other tests have imported. The other profile looks for new counterexamples.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("default"), deadline=None)
FIXED_CONSTANTS = Constants()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        choices=("cpu", "cuda", "tpu"),
        default="cpu",
        help="where tests run; cpu means fake devices",
    )
    parser.addoption(
        "--optimised",
        action="store_true",
        help="compile all programs as users do, which takes twice as long",
    )
    parser.addoption(
        "--fresh-programs",
        action="store_true",
        help="compile all programs again, and keep none for later runs",
    )
    parser.addoption(
        "--thought",
        action="store_true",
        help="skip tests that import JAX or start Python; the others take a minute",
    )
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="begin no further test after so many seconds, in an order of files that changes daily",
    )
    parser.addoption(
        "--day",
        default=f"{datetime.now(UTC):%Y-%m-%d}",
        help="the day whose order of files --until takes; today by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the examples of properties, and JAX as tests need it. Collection imports test modules later."""
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("fixed")
        assert hasattr(providers, "_get_local_constants")
        providers._get_local_constants = lambda: FIXED_CONSTANTS
    seconds = config.getoption("until")
    if seconds is not None:
        config.pluginmanager.register(Until(seconds, config.getoption("day")), "until")
    if config.getoption("thought"):
        config.pluginmanager.register(Thought(), "thought")
    else:
        configure_jax(config)


def configure_jax(config: pytest.Config) -> None:
    """Set JAX's configuration before the first backend starts, and check shapes in packages not yet imported."""
    import jax

    from tests.shapes.hook import check_shapes

    check_shapes(CHECKED_PACKAGES)
    platform = config.getoption("platform")
    jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", FAKE_CPU_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    is_quick = platform == "cpu" and not config.getoption("optimised")
    jax.config.update("jax_disable_most_optimizations", is_quick)
    from tests.run.kept import SHARED, SharedPrograms, keep_programs
    from tests.run.maps import Maps  # they import checked packages

    if platform == "cpu" and not config.getoption("fresh_programs"):
        keep_programs(config)
    else:
        config.stash[SHARED] = SharedPrograms(None)

    config.pluginmanager.register(Maps(), "maps")


def pytest_collection(session: pytest.Session) -> None:
    """Rewrite assertions in all processes of a run at once, and collect no garbage until all modules are imported."""
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is not None and not sys.dont_write_bytecode:
        rewrite_share(
            session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        )


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lasts as long as the run: modules and thousands of tests.

    Afterwards it comes more rarely: by default after every 700 objects. A collection before would take a second or two,
    and free little.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(optionalhook=True)  # a hook of xdist, unknown without the plugin
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The processes of `-n auto`: one per core, at most four; none if they would share a device."""
    by_default = config.getoption("markexpr") in config.getini("addopts")
    if config.getoption("platform") != "cpu" or not by_default:
        return 0
    return min(os.cpu_count() or 1, 4)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests for an accelerator with a reason, also if `-m` selects them without `--platform`.

    Mark tests that have a record: tests/run/records.py.
    """
    for item in items:
        if is_record(item):
            item.add_marker("record")
    platform = config.getoption("platform")
    for marker, needed in (("gpu", "cuda"), ("tpu", "tpu")):
        if needed == platform:
            continue
        skip = pytest.mark.skip(reason=f"needs --platform {needed}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def program_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of compiled programs for the whole run: executors with the same shapes compile once.

    All processes of a run share it.
    """
    from tests.run.kept import SHARED

    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    pytestconfig.stash[SHARED].share(directory)
    return str(directory)


@pytest.fixture
def no_kept_programs() -> Iterator[None]:
    """Find no programs of earlier runs, for tests of what is compiled and kept."""
    from tests.run.kept import forgetting

    with forgetting():
        yield


@pytest.fixture(autouse=True, scope="session")
def no_stored_programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Store no programs: they are found by the code of the package, and some tests replace parts of it."""
    if pytestconfig.getoption("thought"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orca_jax.exec.program_store.code_digest", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_collections(pytestconfig: pytest.Config) -> Iterator[None]:
    """Separate the layers of small models without a collection, which walks what all tests of a process have made.

    It frees the stacks of large models early.
    """
    if pytestconfig.getoption("thought"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orca_jax.model.transformer.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(autouse=True, scope="session")
def weights_drawn_once(pytestconfig: pytest.Config) -> Iterator[None]:
    """Draw the random weights of equal small models once in this process."""
    if pytestconfig.getoption("thought"):
        yield
        return
    from tests.programs import drawn_once

    with drawn_once():
        yield


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Compile each program of executors once in this process: equal programs are neither traced nor compiled again."""
    from orca_jax.exec.programs import Programs
    from tests.programs import remembering

    with pytest.MonkeyPatch.context() as patch:
        for name, method in remembering().items():
            patch.setattr(Programs, name, method)
        yield


@pytest.fixture
def compiled_when_used(compiled_once: None) -> Iterator[None]:
    """Compile each program once in this process, at its first launch: most tests use few of them.

    An executor measures nothing at start. Nothing but these programs may be compiled while serving.
    """
    from tests.programs import compiled_late

    with compiled_late():
        yield


@pytest.fixture
def narrow_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile no samplers wider than the few rows of a test."""
    from tests import programs

    programs.narrow_samplers(monkeypatch)


@pytest.fixture
def few_programs() -> Iterator[None]:
    """Compile fewer programs, with more padding."""
    from tests.programs import few_sizes

    with few_sizes():
        yield


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Compile without most of LLVM's work, in half of the time, also with --optimised.

    For tests that tokens do not depend on the scheduler or the pages: any correct program will do.
    """
    from tests.programs import compiled_with

    with compiled_with(optimised=False):
        yield


@pytest.fixture(autouse=True)
def programs_of_users(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile as users do in the folders that compare numbers, unless a test needs equal tokens alone."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in NUMBERS or "quick_compiles" in request.fixturenames:
        yield
        return
    from tests.programs import compiled_with

    with compiled_with(optimised=True):
        yield


@pytest.fixture
def optimised() -> Iterator[None]:
    """Compile the programs that users run: for tests of memory, and of bits that depend on a program."""
    from tests.programs import compiled_with

    with compiled_with(optimised=True):
        yield
