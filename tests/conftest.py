"""Every test runs strict: eight fake CPU devices, no implicit dtype promotion, shapes checked against their types."""

import os
from collections.abc import Iterator

import jax
import pytest
from jaxtyping import install_import_hook

FAKE_CPU_DEVICES = 8
CHECKED_PACKAGES = ("orca_jax.kernels", "orca_jax.model", "orca_jax.exec", "orca_jax.ranker")

# Held for the whole run; it must exist before a checked package is imported, hence here and not in a fixture.
_shape_checks = install_import_hook(CHECKED_PACKAGES, "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform", choices=("cpu", "cuda", "tpu"), default="cpu", help="where tests run; cpu means fake devices"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settle JAX's configuration before the first backend starts: collection imports test modules after this."""
    platform = config.getoption("platform")
    jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", FAKE_CPU_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(optionalhook=True)  # xdist's, and plain pytest goes without it
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` of scripts/test means: one process a core, four at most; none where they would share a device."""
    by_default = config.getoption("markexpr") in config.getini("addopts")
    if config.getoption("platform") != "cpu" or not by_default:
        return 0
    return min(os.cpu_count() or 1, 4)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test for an accelerator says why it did not run, also where `-m` selects it without `--platform`."""
    platform = config.getoption("platform")
    for marker, needed in (("gpu", "cuda"), ("tpu", "tpu")):
        if needed == platform:
            continue
        skip = pytest.mark.skip(reason=f"needs --platform {needed}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of compiled programs for the whole run: executors of the same shapes compile once."""
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Compile without most of LLVM's work, in half of the time.

    For a test that asks whether tokens depend on the scheduler or the pages, where any correct program will do; not
    where numbers or memory are judged, which must be those of the programs that users run.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
