"""The sockets of a cluster: ZeroMQ over TCP, with CURVE keys.

A socket belongs to one thread. The leader binds to one address, and every port is next to the first one.
"""

import logging
import socket
from collections.abc import Iterator
from enum import Enum, auto

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from orca_jax.cluster.keys import ClusterKeys
from orca_jax.values.errors import ConfigError

NUM_PORTS = 3  # of the leader: control, plans, and the coordinator of JAX
MAX_MESSAGE_BYTES = 64 * 2**20
# messages that wait for one process; its receiver does not read if there are more
MAX_UNSENT = 1000
LINGER_MS = 500  # for the last messages, when a socket is closed
_ZAP = "inproc://zeromq.zap.01"  # ZeroMQ sends each handshake there (RFC 27)

logger = logging.getLogger(__name__)


def resolve(address: str) -> str:
    """The IP address of a host name.

    Raises:
        ConfigError: there is none; `param` is "master_addr".
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{address!r} has no address: {error.strerror}", param="master_addr"
        ) from None
    return str(found[0][4][0])


def place(ip: str, port: int) -> str:
    """The address `host:port`, with brackets for IPv6."""
    if ":" in ip:
        return f"[{ip}]:{port}"
    return f"{ip}:{port}"


def leader_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", keys: ClusterKeys
) -> "zmq.Socket[bytes]":
    """A socket of the leader, to bind. A message to a process that is not connected, or does not read, is an error."""
    made = _socket(context, zmq.ROUTER)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    made.setsockopt(zmq.CURVE_SERVER, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.leader)
    made.setsockopt_string(zmq.ZAP_DOMAIN, "orca-jax")
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return made


def worker_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", keys: ClusterKeys, identity: bytes | None = None
) -> "zmq.Socket[bytes]":
    """A socket of a worker, to connect."""
    made = _socket(context, zmq.DEALER)
    made.setsockopt(zmq.RECONNECT_IVL, 200)
    if identity is not None:
        made.setsockopt(zmq.ROUTING_ID, identity)
    made.setsockopt(zmq.CURVE_SERVERKEY, keys.leader_public)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.worker)
    made.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public)
    return made


def bind(bound: "zmq.Socket[bytes]", ip: str, port: int) -> None:
    """Listen on one address.

    Raises:
        ConfigError: it is taken, or is not an address of this host.
    """
    try:
        bound.bind(f"tcp://{place(ip, port)}")
    except zmq.ZMQError as error:
        param = "master_port" if error.errno == zmq.EADDRINUSE else "master_addr"
        raise ConfigError(f"cannot listen on {place(ip, port)}: {error}", param=param) from None


def check_free(ip: str, port: int) -> None:
    """Check that another library can listen on an address.

    Raises:
        ConfigError: it is taken, or is not an address of this host.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((ip, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {place(ip, port)}: {error.strerror}", param="master_port"
            ) from None


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    made = context.socket(kind)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    made.setsockopt(zmq.RCVHWM, MAX_UNSENT)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return made


class Change(Enum):
    """A change of a connection."""

    CONNECTED = auto()  # the handshake has succeeded
    LOST = auto()
    WRONG_KEY = auto()  # the handshake has failed; ZeroMQ connects again
    NO_KEY = auto()  # one side has no key; ZeroMQ does not connect again


_CHANGES = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Change.CONNECTED,
    zmq.EVENT_DISCONNECTED: Change.LOST,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Change.WRONG_KEY,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Change.NO_KEY,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Change.WRONG_KEY,
}


class ConnectionMonitor:
    """Reports changes of the connections of a socket, with the number of the connection's descriptor."""

    def __init__(self, watched: "zmq.Socket[bytes]") -> None:
        events = 0
        for event in _CHANGES:
            events |= int(event)
        self.socket = watched.get_monitor_socket(events)
        self._watched = watched

    def changes(self) -> Iterator[tuple[Change, int]]:
        """All changes since the last call, without waiting."""
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)
            yield _CHANGES[zmq.Event(event["event"])], event["value"]

    def close(self) -> None:
        """Stop reporting changes."""
        self._watched.disable_monitor()


class Gatekeeper:
    """Answers ZeroMQ's question for each handshake of the leader's sockets: only the key of the workers is accepted."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: ClusterKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)
        self._accepted = z85.decode(keys.worker_public)

    def answer(self) -> None:
        """Answer one question."""
        version, number, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
        is_accepted = mechanism == b"CURVE" and credentials == [self._accepted]
        if not is_accepted:
            logger.warning(
                "refused a connection from %s: it has a wrong cluster key",
                address.decode(errors="replace"),
            )
        status, text = (b"200", b"OK") if is_accepted else (b"400", b"wrong cluster key")
        self.socket.send_multipart([version, number, status, text, b"", b""])
