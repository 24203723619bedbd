"""Key files are made once, stay secret, and are refused by name if they are not."""

import subprocess
import sys
from pathlib import Path

import pytest

from orca_jax.cluster.keys import make_key_file, read_keys
from orca_jax.values.errors import ConfigError


def test_a_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    keys = read_keys(path)
    assert keys.leader != keys.worker
    assert keys.leader.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("mode", "text", "hint"),
    [
        (0o640, None, "chmod 600"),
        (0o600, "leader = short\n", "keygen"),
        (0o600, "leader = " + "x" * 40 + "\nworker = \xff", "keygen"),
        (0o600, "leader = " + '"' * 40 + "\nworker = " + '"' * 40, "keygen"),
    ],
)
def test_a_wrong_file_is_named_with_its_remedy(
    mode: int, text: str | None, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    if text is not None:
        path.write_text(text, encoding="latin-1")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=hint) as error:
        read_keys(path)
    assert error.value.param == "cluster_key_file"


def test_the_command_overwrites_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orca_jax.cluster", "keygen", str(tmp_path / "key")]
    assert subprocess.run(command, check=False).returncode == 0
    content = (tmp_path / "key").read_bytes()
    second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert second.returncode == 2
    assert "exists" in second.stderr
    assert (tmp_path / "key").read_bytes() == content
