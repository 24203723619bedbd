"""Names of devices, their memory and their hosts, and the splits of models over them."""

import json

import pytest

from orca_jax.assembly.support import WHOLE_SLICES
from orca_jax.exec.host import num_processors
from orca_jax.model.describe import read_model_config
from orca_jax.tools.plan.__main__ import main
from orca_jax.tools.plan.accelerators import (
    ACCELERATORS,
    GIB,
    Devices,
    parse_devices,
    parse_memory,
)
from orca_jax.tools.plan.memory import Split
from orca_jax.tools.plan.options import splits
from orca_jax.values.errors import ConfigError
from tests.plan.test_plan import TINY, plan


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [
        ("h200x8", "h200", 8),
        ("v5e-8", "v5e", 8),
        ("v5p-8", "v5p", 4),
        ("v5px8", "v5p", 8),
        ("a100-80", "a100-80", 1),
        ("a100-80x16", "a100-80", 16),
        ("tpu7x-8", "tpu7x", 8),
        ("tpu-v6e-4", "v6e", 4),
        ("v7x-8", "tpu7x", 8),
        ("RTX4090x2", "rtx4090", 2),
    ],
)
def test_names_of_devices(text: str, name: str, number: int) -> None:
    is_slice = "-" in text.removeprefix("tpu-").removeprefix("a100-80")
    assert parse_devices(text) == Devices(name, ACCELERATORS[name], number, is_slice)


@pytest.mark.parametrize("text", ["b300x8", "h20", "", "x8", "h200xmany", "8xh200"])
def test_unknown_devices_list_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_devices(text)
    assert error.value.param == "devices"
    assert all(name in str(error.value) for name in ACCELERATORS)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("16GB", 16e9), ("0.5GiB", GIB / 2)]
)
def test_sizes_of_memory(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "0GiB", "-1GB", "1e9GB", "24 gib", ""])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 24GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("devices", "each"), [("l4", 22 * GIB), ("cpu", 22 * GIB / num_processors())]
)
def test_memory_of_other_machines(
    devices: str, each: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["--model", "preset:gpt2-tiny", "--devices", devices, "--memory", "22GiB", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["devices"]["memory"] == each


@pytest.mark.parametrize("text", ["h200x0", "v5ex999999", "v5p-7"])
def test_numbers_of_devices(text: str) -> None:
    with pytest.raises(ConfigError, match="the number must be"):
        parse_devices(text)


def test_splits_divide_heads_and_stay_within_hosts() -> None:
    llama = read_model_config("preset:llama-3-70b")  # 8 key/value heads, 80 layers
    found = splits(llama, parse_devices("h200x16"))
    assert {split.tensor for split in found} == {1, 2, 4, 8}
    assert Split(8, 2) in found and Split(1, 16) in found and Split(16, 1) not in found
    gpt = read_model_config("preset:gpt3-175b")
    assert Split(16, 1) in splits(gpt, parse_devices("v5e-16"))
    assert Split(16, 1) not in splits(gpt, parse_devices("a100-80x16"))
    assert max(split.stages for split in splits(TINY, parse_devices("h200x8"))) == 2  # layers


@pytest.mark.parametrize(
    ("devices", "hosts"),
    [
        ("v5e-8", 1),
        ("v5e-16", 4),
        ("v5e-32", 8),
        ("v6e-8", 1),
        ("v6e-32", 8),
        ("v5p-32", 4),
        ("h200x16", 2),
    ],
)
def test_hosts_of_slices(devices: str, hosts: int) -> None:
    """A host of a v5e or v6e slice has eight chips if it is alone, and else four: so says libtpu's topology."""
    found = parse_devices(devices)
    assert found.kind.num_hosts(found.number) == hosts


def test_a_slice_of_several_hosts_serves_one_engine() -> None:
    llama = read_model_config("preset:llama-3-70b")
    assert {split.num_devices for split in splits(llama, parse_devices("v5p-64"))} == {32}
    assert {split.num_devices for split in splits(llama, parse_devices("v5px32"))} > {8, 16, 32}


def test_a_slice_without_parts_has_no_stages() -> None:
    """The compiler refuses a part of a v5e or v6e slice of several hosts; of v5p and on one host it takes them."""
    llama = read_model_config("preset:llama-3-70b")
    for devices in ("v5e-32", "v6e-32"):
        assert splits(llama, parse_devices(devices)) == [Split(32, 1)]
    assert Split(8, 4) in splits(llama, parse_devices("v5p-64"))
    assert Split(4, 2) in splits(llama, parse_devices("v6e-8"))
    (option,) = plan(llama, "v6e-32")
    assert option.nodes == 8 and "--pipeline-parallel-size" not in option.flags()
    (kind,) = {parse_devices(name).kind.device_kind for name in ("v5e-32", "v5ex8")}
    assert kind == WHOLE_SLICES[0]
