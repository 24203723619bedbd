"""The front end's handle on the engine: one client for the life of the server, over one engine process after another.

`EngineClient.open` submits the requests of one HTTP call and returns an `OpenCall`. The client routes each message of
the engine to the open call that submitted the request.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec

from orca_jax.link.adapters import ServedAdapters
from orca_jax.link.admission import NO_DEADLINES, Admission, Deadlines
from orca_jax.link.changes.asked import EngineChanges
from orca_jax.link.errors import TimedOut, Unavailable
from orca_jax.link.feed import Feed
from orca_jax.link.restarts.kept import KeptRequests
from orca_jax.link.wire import (
    Abort,
    EngineAnswer,
    EngineCall,
    FromEngine,
    FromFrontEnd,
    Heartbeat,
    Iterations,
    ReadWeights,
    Ready,
    Rejected,
    ReplaceWeights,
    Submit,
    Updates,
    Watch,
)
from orca_jax.server_config import ServerConfig
from orca_jax.values.request import RequestUpdate
from orca_jax.values.startup import EngineSummary

MAX_UNREAD = 2048  # updates per request that may wait for a reader; more of them end the call

EngineState = Literal[
    "loading", "compiling", "ready", "draining", "stopping", "restarting", "hung", "dead"
]

_REFUSALS: dict[EngineState, str] = {
    "loading": "the model is still loading",
    "compiling": "the model is still being compiled",
    "draining": "the server is shutting down",
    "stopping": "the server is shutting down",
    "restarting": "the engine is being started again",
    "hung": "the engine does not respond",
    "dead": "the engine has ended",
}


class Link(Protocol):
    """A connection to an engine. The engine's messages go to `EngineClient.take_message`, in the engine's order."""

    def send(self, message: FromFrontEnd) -> None:
        """Send a message to the engine; discard it if the engine has ended."""
        ...


class OpenCall:
    """The requests of one HTTP call, from `EngineClient.open` on.

    An async context manager: leaving it aborts the requests that have not ended. The first error does so too.
    """

    def __init__(
        self,
        client: "EngineClient",
        requests: Sequence[Submit],
        limits: Deadlines,
        quiet: float | None = None,
    ) -> None:
        # Prompt lengths of the requests without an update so far; the client removes them.
        self.waiting = {request.request_id: len(request.prompt_ids) for request in requests}
        self._client = client
        self._ids = tuple(self.waiting)
        self._unread: list[RequestUpdate | Rejected] = []
        self._max_unread = MAX_UNREAD * len(self._ids)
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self.weight_version: int | None = None  # of the weights that made its first update
        self._quiet = quiet
        self._heard = 0.0  # time of the last message, on the clock of the loop
        self._quiet_timer: asyncio.TimerHandle | None = None
        if quiet is not None:
            self._heard = asyncio.get_running_loop().time()
            self._look()
        for seconds, end in ((limits.queue, self._end_if_waiting), (limits.total, self._end_late)):
            if seconds is not None:
                self._timers.append(asyncio.get_running_loop().call_later(seconds, end))

    async def receive(self) -> list[RequestUpdate | Rejected]:
        """Wait for messages about these requests; return all that have arrived, in the engine's order.

        The list is empty each time a quiet period has passed without a message.

        Raises:
            Exception: the argument of `fail`, after the messages before it.
        """
        await self._news.wait()
        if not self._unread and self._error is not None:
            raise self._error
        messages = self._unread
        self._unread = []
        if self._error is None:
            self._news.clear()
        return messages

    def deliver(self, message: RequestUpdate | Rejected) -> None:
        """Add a message for `receive`. The client calls this in the engine's order."""
        self._unread.append(message)
        self._news.set()
        if self._quiet is not None:
            self._heard = asyncio.get_running_loop().time()
        if len(self._unread) > self._max_unread:
            self._unread.clear()  # the rest of a text with a gap is useless
            self.fail(TimedOut("the client reads the answer too slowly", "client_too_slow"))

    def fail(self, error: Exception) -> None:
        """End the call, since the engine died, the server stops, time is up, or the caller hung up.

        The first error counts. The engine gets the aborts at once: the reader of this call may be stuck in a write.
        """
        if self._error is None:
            self._error = error
            self._news.set()
            self._end()

    def abort(self, request_id: str) -> None:
        """End one request; `receive` returns nothing more for it."""
        self._client.abort(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._client.close(self)
        # Its traceback holds this call, and with it everything of the request, until a rare garbage collection.
        self._error = None

    def _end(self) -> None:
        for timer in (*self._timers, self._quiet_timer):
            if timer is not None:
                timer.cancel()
        for request_id in self._ids:
            self._client.abort(request_id)

    def _look(self) -> None:
        """Let `receive` return if nothing was heard for a quiet period, and look again after the next one."""
        assert self._quiet is not None, "only calls with quiet periods look"
        loop = asyncio.get_running_loop()
        if loop.time() >= self._heard + self._quiet:
            self._heard = loop.time()
            self._news.set()
        self._quiet_timer = loop.call_at(self._heard + self._quiet, self._look)

    def _end_if_waiting(self) -> None:
        if self.waiting:
            message = "the request waited longer for the engine than its queue timeout allows; try again later"
            self.fail(TimedOut(message, "queue_timeout"))

    def _end_late(self) -> None:
        message = (
            "the request took longer than its timeout allows; ask for fewer tokens or for more time"
        )
        self.fail(TimedOut(message, "timeout"))


class EngineClient:
    """Submits requests and routes the engine's messages. All methods belong to one event loop.

    A supervisor puts engine processes behind it (`attach`, `serve`, `lose`); the server ends it (`drain`, `stop`).

    Args:
        config: limits on queue and time.
        on_heartbeat: called with every heartbeat of every engine.

    Attributes:
        state: "ready" while requests are accepted; otherwise the reason for refusing them.
        running, waiting: requests with and without a row, in the engine's last message.
        self_tests: results of the engine's attention kernels by implementation; empty without a test.
        summary: the settings and the start of the engine that serves or served last; None before the first one.
        ready: resolves when an engine serves for the first time; fails if none ever will.
        idle: set while no call is open.
        feed: the engine's iterations for pages that watch.
        adapters: loads and unloads adapters.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None,
    ) -> None:
        self.state: EngineState = "loading"
        self.running = 0
        self.waiting = 0
        self.self_tests: dict[str, str] = {}
        self.summary: EngineSummary | None = None
        self.reads = frozenset[str]()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self.feed = Feed(self._post)
        self.changes = EngineChanges(self._send_call)
        self.adapters = ServedAdapters(self.changes)
        self._config = config
        self._limits = Deadlines(config.queue_timeout, config.request_timeout)
        self._admission = Admission(config)
        self._on_heartbeat = on_heartbeat
        self._watch: Callable[[Heartbeat], None] | None = None  # of the engine that is attached
        self._routes: dict[str, OpenCall] = {}  # request id -> its call, until the request ends
        self._calls: set[OpenCall] = set()
        # what outlives an engine; None: calls end with it
        self._kept: KeptRequests | None = None
        if config.restarts:
            self._kept = KeptRequests(config.engine.seed, self.adapters.loaded)
        self._has_new_weights = False  # or may have: the next engine has those of the model
        self._numbers = itertools.count()
        self._weight_version = 0  # as far as is known
        self._link: Link | None = None

    @property
    def num_calls(self) -> int:
        """Number of open calls."""
        return len(self._calls)

    def new_request_id(self) -> str:
        """A request id that no other request of this client has."""
        return f"r{next(self._numbers)}"

    def check_room(self, prompt_lengths: Sequence[int]) -> None:
        """Refuse a call before its prompts are made.

        Raises:
            Unavailable: the engine does not serve.
            Overloaded: the queue is full.
            CallTooLarge: the call is larger than the queue.
        """
        self._serving_link()
        self._admission.check(prompt_lengths)

    def open(
        self,
        requests: Sequence[Submit],
        deadlines: Deadlines = NO_DEADLINES,
        quiet: float | None = None,
    ) -> OpenCall:
        """Submit the requests of one call, all or none. Leave the returned call to end it.

        They enter the scheduler between the same two iterations, except those that wait for a grammar.

        The server's limits hold in addition to `deadlines`. The engine gets each request with the resulting total as
        the deadline of its urgency.

        Args:
            requests: requests with ids from `new_request_id`.
            deadlines: seconds from now, for the whole call.
            quiet: seconds without a message after which `receive` returns an empty list; None: it waits.

        Raises:
            Unavailable: the engine does not serve.
            Overloaded: the queue is full.
            CallTooLarge: the call is larger than the queue.
        """
        link = self._serving_link()
        self._admission.admit([len(request.prompt_ids) for request in requests])
        limits = deadlines.within(self._limits)
        call = OpenCall(self, requests, limits, quiet)
        self._calls.add(call)
        self.idle.clear()
        for left, request in enumerate(requests, 1 - len(requests)):
            if request.urgency.deadline != limits.total:
                urgency = dataclasses.replace(request.urgency, deadline=limits.total)
                request = msgspec.structs.replace(request, urgency=urgency)
            self._routes[request.request_id] = call
            if self._kept is not None:
                request = self._kept.keep(request)
            link.send(msgspec.structs.replace(request, has_more=True) if left else request)
        return call

    def close(self, call: OpenCall) -> None:
        """Forget a call. Its requests must have ended or been aborted; the call itself does this."""
        self._calls.discard(call)
        if not self._calls:
            self.idle.set()

    def abort(self, request_id: str) -> None:
        """End a request; do nothing if it has ended."""
        if request_id in self._routes:
            self._forget(request_id)
            if self._link is not None:
                self._link.send(Abort(request_id))

    async def update_weights(
        self, source: str, version: int | None = None, *, aborts: bool = False
    ) -> int:
        """Replace the weights by those of the checkpoint `source`, and return their version.

        The engine serves while it reads them. The calls that are open then finish with the old weights, or are aborted
        if `aborts` is set, and later ones wait for the new weights. If the engine is started again, it has the weights
        of its model, and version 0.

        Raises:
            RequestError: the checkpoint does not fit, or the engine cannot replace weights; the weights are unchanged.
            Unavailable: the engine does not serve, or ended before the weights were replaced.
        """
        return await asyncio.shield(self._update_weights(source, version, aborts))

    async def _update_weights(self, source: str, version: int | None, aborts: bool) -> int:
        await self.changes.ask(ReadWeights(source, version))
        self._has_new_weights = True
        answer = await self.changes.ask(ReplaceWeights(aborts))
        self.changes.note_awake("weights")
        return answer.version

    @property
    def _is_restarted(self) -> bool:
        """True if an engine that serves, or has served, is followed by another one."""
        return self._kept is not None and self.ready.done()

    def attach(self, link: Link, watch: Callable[[Heartbeat], None] | None = None) -> None:
        """Use a new engine, still loading. Its messages go to `take_message`, and its heartbeats also to `watch`."""
        self._link = link
        self._watch = watch
        self._move("restarting" if self._is_restarted else "loading")

    def serve(self, ready: Ready) -> None:
        """Accept requests: the engine serves, with the adapters of its settings or those loaded again."""
        self._admission.num_rows = ready.num_rows
        self._weight_version = 0
        self._has_new_weights = False
        self.changes.forget()
        self.self_tests = ready.self_tests
        self.summary = ready.summary
        self.reads = ready.reads
        self._move("ready")
        self.feed.resume()
        paths = self._config.engine.lora_paths
        self.adapters.loaded.update({name: paths[name] for name in ready.adapters})
        if not self.ready.done():
            self.ready.set_result(ready)
        self._resume()

    def lose(self, state: Literal["hung", "dead"]) -> None:
        """Note that the engine hangs or has ended.

        All open calls end with an error, unless another engine will go on with them: it must have the same weights.
        """
        self._link = None
        self.running = self.waiting = 0
        error = Unavailable(_REFUSALS[state])
        if not self._is_restarted:
            self._move(state)
            self._fail_all(error)
            return
        self._move("restarting")
        self.changes.fail(error)
        if self._has_new_weights:
            self._fail_all(error)

    def give_up(self, error: Exception) -> None:
        """End all open calls, and fail `ready` if no engine has served: none will be started any more."""
        self._move("dead")
        self._fail_all(Unavailable(_REFUSALS["dead"]))
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # without a reader asyncio would log it as never retrieved

    def drain(self) -> None:
        """Accept no more calls; let the open ones end by themselves."""
        self._move("draining")

    def stop(self) -> None:
        """Accept no more calls, and end all open ones with an error, those for weights and adapters included."""
        self._move("stopping")
        self.feed.close()
        self._fail_all(self._refusal())

    def take_message(self, message: FromEngine) -> None:
        """Route a message of the engine."""
        match message:
            case Updates(updates, running, waiting):
                self.running = running
                self.waiting = waiting
                self._weight_version = message.weight_version
                for update in updates:
                    self._deliver(update, is_last=update.finish_reason is not None)
            case EngineAnswer():
                self.changes.end(message)
            case Rejected():
                self._deliver(message, is_last=True)
            case Iterations(lines):
                self.feed.take_lines(lines)
            case Heartbeat():
                if message.phase == "compiling" and self.state == "loading":
                    self._move("compiling")
                self._on_heartbeat(message)
                if self._watch is not None:
                    self._watch(message)

    def _deliver(self, message: RequestUpdate | Rejected, is_last: bool) -> None:
        call = self._routes.get(message.request_id)
        if call is None:
            return  # sent before the engine read the abort
        if is_last:
            self._forget(message.request_id)
        elif call.waiting:
            self._admission.started(call.waiting.pop(message.request_id, 0))
        if self._kept is not None and not is_last and isinstance(message, RequestUpdate):
            self._kept.hear(message)
        if call.weight_version is None:
            call.weight_version = self._weight_version
        elif call.weight_version != self._weight_version and isinstance(message, RequestUpdate):
            message = message._replace(weight_version=self._weight_version)
        call.deliver(message)

    def _resume(self) -> None:
        """Submit the open requests again, to an engine that has none of them."""
        if self._kept is None or self._link is None:
            return
        for request_id in self._kept.lost():
            # another request of the call may have ended it
            if (call := self._routes.get(request_id)) is not None:
                call.fail(Unavailable(_REFUSALS["dead"]))
        again = self._kept.again()
        calls = [self._routes[request.request_id] for request in again]
        for request, (call, following) in zip(again, pairwise([*calls, None]), strict=True):
            self._link.send(msgspec.structs.replace(request, has_more=call is following))

    def _forget(self, request_id: str) -> None:
        if self._kept is not None:
            self._kept.forget(request_id)
        self._admission.left(self._routes.pop(request_id).waiting.pop(request_id, 0))

    def _send_call(self, call: EngineCall) -> None:
        """Send a call. While the server drains, only a call that replaces weights is sent."""
        link = self._link
        if link is None or not isinstance(call.change, ReplaceWeights):
            link = self._serving_link()
        link.send(call)

    def _post(self, message: Watch) -> None:
        if self._link is not None:
            self._link.send(message)

    def _fail_all(self, error: Exception) -> None:
        for call in tuple(self._calls):
            call.fail(error)
        self.changes.fail(error)

    def _serving_link(self) -> Link:
        """The link to the engine. Raises Unavailable if it does not serve."""
        if self.state != "ready" or self._link is None:
            raise self._refusal()
        return self._link

    def _refusal(self) -> Unavailable:
        return Unavailable(_REFUSALS.get(self.state, "the engine is not there"))

    def _move(self, state: EngineState) -> None:
        """Change the state. Once the server ends, only the engine's end still changes it."""
        is_ending = self.state in ("draining", "stopping")
        starts = ("loading", "compiling", "ready", "restarting")
        if self.state == "stopping" or (is_ending and state in starts):
            return
        if self.state == "hung" and state == "dead":
            return  # it died because it was killed for hanging
        self.state = state
