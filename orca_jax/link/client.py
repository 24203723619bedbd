"""The front end's handle on the engine: one object for the life of the server, whichever process runs behind it."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from orca_jax.link.admission import NO_DEADLINES, Admission, Deadlines, EngineRequest
from orca_jax.link.errors import Unavailable
from orca_jax.link.mailbox import Mailbox
from orca_jax.link.wire import Abort, FromEngine, Heartbeat, Ready, Rejected, Submit, Updates
from orca_jax.request import DEFAULT_URGENCY, RequestUpdate, Urgency
from orca_jax.server_config import ServerConfig

__all__ = ["Deadlines", "EngineClient", "EngineRequest", "Mailbox", "State"]

State = Literal["loading", "compiling", "ready", "draining", "stopping", "hung", "dead"]

_REFUSALS: dict[State, str] = {
    "loading": "the model is still loading",
    "compiling": "the model is still being compiled",
    "draining": "the server is shutting down",
    "stopping": "the server is shutting down",
    "hung": "the engine does not respond",
    "dead": "the engine has ended",
}


class Link(Protocol):
    """The way to an engine: what it answers comes to `EngineClient.take`, in its order."""

    def send(self, message: Submit | Abort) -> None:
        """Tell the engine; into the void where it has ended."""
        ...


class _Route:
    """Where a request's updates go. `waiting_tokens` is its prompt's length until the first of them, then 0."""

    __slots__ = ("index", "mailbox", "waiting_tokens")

    def __init__(self, mailbox: Mailbox, index: int, waiting_tokens: int) -> None:
        self.mailbox = mailbox
        self.index = index
        self.waiting_tokens = waiting_tokens


class EngineClient:
    """Submits requests and routes what comes back. All methods belong to one event loop.

    A supervisor puts processes behind it (`attach`, `serve`, `lose`), the server ends it (`drain`, `stop`).

    Args:
        config: limits on queue and time.
        on_heartbeat: told of every sign of life of the engine.

    Attributes:
        state: whether requests are taken ("ready"), and why not.
        running, waiting: requests with and without a row, as the engine last said.
        ready: resolves when an engine serves for the first time, and fails when none ever will.
        idle: set while no call is open.
    """

    def __init__(self, config: ServerConfig, on_heartbeat: Callable[[Heartbeat], None] = lambda beat: None) -> None:
        self.state: State = "loading"
        self.running = 0
        self.waiting = 0
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self._limits = Deadlines(config.queue_timeout, config.request_timeout)
        self._admission = Admission(config)
        self._on_heartbeat = on_heartbeat
        self._routes: dict[str, _Route] = {}
        self._calls: set[Mailbox] = set()
        self._numbers = itertools.count()
        self._link: Link | None = None

    @property
    def num_calls(self) -> int:
        """Calls that are open."""
        return len(self._calls)

    def open(
        self, requests: Sequence[EngineRequest], deadlines: Deadlines = NO_DEADLINES, urgency: Urgency = DEFAULT_URGENCY
    ) -> Mailbox:
        """Submit the requests of one call, all or none. The server's own limits hold beside `deadlines`.

        `urgency` is theirs; its deadline is the one that holds for the whole call.

        Raises:
            Unavailable: the engine does not serve.
            Overloaded: the queue is full.
            CallTooLarge: the queue could never hold the call.
        """
        if self.state != "ready" or self._link is None:
            raise self._refusal()
        self._admission.admit([len(ids) for ids, _ in requests])
        request_ids = [f"r{next(self._numbers)}" for _ in requests]
        mailbox = Mailbox(request_ids, self._abort, self._leave)
        limits = deadlines.within(self._limits)
        mailbox.limit(limits)
        urgency = dataclasses.replace(urgency, deadline=limits.total)
        self._calls.add(mailbox)
        self.idle.clear()
        for index, (request_id, (prompt_ids, params)) in enumerate(zip(request_ids, requests, strict=True)):
            self._routes[request_id] = _Route(mailbox, index, len(prompt_ids))
            self._link.send(Submit(request_id, prompt_ids, params, urgency))
        return mailbox

    def attach(self, link: Link) -> None:
        """A new engine loads behind this client; its messages go to `take`."""
        self._link = link
        self._move("loading")

    def serve(self, ready: Ready) -> None:
        """The process serves, and so do we."""
        self._admission.num_rows = ready.num_rows
        self._move("ready")
        if not self.ready.done():
            self.ready.set_result(ready)

    def lose(self, state: Literal["hung", "dead"]) -> None:
        """The process hangs or has ended: so do all open calls."""
        self._link = None
        self.running = self.waiting = 0
        self._move(state)
        self._fail_all(Unavailable(_REFUSALS[state]))

    def give_up(self, error: Exception) -> None:
        """There will be no process any more."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody has to look at it

    def drain(self) -> None:
        """Take no more; what is open goes on."""
        self._move("draining")

    def stop(self) -> None:
        """Take no more, and end all open calls with an error."""
        self._move("stopping")
        self._fail_all(self._refusal())

    def take(self, message: FromEngine) -> None:
        """A message of the engine."""
        match message:
            case Updates(updates, running, waiting):
                self.running, self.waiting = running, waiting
                for update in updates:
                    self._deliver(update, is_last=update.finish_reason is not None)
            case Rejected():
                self._deliver(message, is_last=True)
            case Heartbeat():
                if message.phase == "compiling" and self.state == "loading":
                    self._move("compiling")
                self._on_heartbeat(message)

    def _deliver(self, item: RequestUpdate | Rejected, is_last: bool) -> None:
        route = self._routes.get(item.request_id)
        if route is None:
            return  # it was aborted, and this was already on its way
        if is_last:
            self._forget(item.request_id)
        elif route.waiting_tokens:
            self._admission.started(route.waiting_tokens)
            route.waiting_tokens = 0
        route.mailbox.deliver(route.index, item)

    def _abort(self, request_id: str) -> None:
        if request_id in self._routes:
            self._forget(request_id)
            if self._link is not None:
                self._link.send(Abort(request_id))

    def _forget(self, request_id: str) -> None:
        self._admission.left(self._routes.pop(request_id).waiting_tokens)

    def _leave(self, mailbox: Mailbox) -> None:
        self._calls.discard(mailbox)
        if not self._calls:
            self.idle.set()

    def _fail_all(self, error: Exception) -> None:
        for mailbox in tuple(self._calls):
            mailbox.fail(error)

    def _refusal(self) -> Unavailable:
        return Unavailable(_REFUSALS.get(self.state, "the engine is not there"))

    def _move(self, state: State) -> None:
        """Once the server ends, only the engine's end is still news."""
        is_ending = self.state in ("draining", "stopping")
        if self.state == "stopping" or (is_ending and state in ("loading", "compiling", "ready")):
            return
        if self.state == "hung" and state == "dead":
            return  # we killed it
        self.state = state
