"""The key file of a cluster: two CURVE key pairs, one for the leader and one for all workers.

Each host has a copy. A process without it can neither join nor read what others send.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from orca_jax.flags.needs import check_needs
from orca_jax.values.errors import ConfigError, reason_of
from orca_jax.values.startup import ClusterConfig

_HEADING = "# Keys of an orca-jax cluster. Keep this file secret, and copy it to each host.\n"
_SECRET = re.compile(r"^(leader|worker) = (\S{40})$", re.MULTILINE)  # 32 bytes in Z85
_PARAM = "cluster_key_file"


@dataclass(frozen=True)
class ClusterKeys:
    """The secret keys, in Z85."""

    leader: bytes
    worker: bytes

    @property
    def leader_public(self) -> bytes:
        """The public key of the leader."""
        return zmq.curve_public(self.leader)

    @property
    def worker_public(self) -> bytes:
        """The public key of all workers."""
        return zmq.curve_public(self.worker)

    def __repr__(self) -> str:
        return "ClusterKeys(...)"


def make_key_file(path: Path) -> None:
    """Write a file with new keys, readable by its owner alone.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    text = _HEADING + "".join(
        f"{name} = {zmq.curve_keypair()[1].decode()}\n" for name in ("leader", "worker")
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists; remove it first, or give another name", param=_PARAM
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason_of(error)}", param=_PARAM) from None


def keys_of(config: ClusterConfig) -> ClusterKeys:
    """The keys of a cluster. Raises ConfigError if it has no key file, or as `read_keys` does."""
    check_needs("serve with --nnodes", config, ("nnodes",))
    return read_keys(Path(str(config.cluster_key_file)))


def read_keys(path: Path) -> ClusterKeys:
    """Read a key file.

    Raises:
        ConfigError: the file cannot be read, has other content, or is open to other users.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", param=_PARAM) from None
    except UnicodeDecodeError:
        text = ""
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} is open to other users; run: chmod 600 {path}", param=_PARAM)
    found = dict(_SECRET.findall(text))
    try:
        keys = ClusterKeys(found["leader"].encode(), found["worker"].encode())
        _ = keys.leader_public, keys.worker_public
    except (KeyError, ValueError, zmq.ZMQError):
        message = (
            f"{path} is not a key file; make one with: python -m orca_jax.cluster keygen {path}"
        )
        raise ConfigError(message, param=_PARAM) from None
    return keys
