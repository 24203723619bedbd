"""The loop around an engine: read messages, step the engine, send updates."""

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from orca_jax.assembly.adapters import AdapterReader, ReadAdapter
from orca_jax.assembly.built import Built, PrepareUpdate, refuse_toy
from orca_jax.engine import Engine, EngineStats
from orca_jax.link.changes.held import HeldRequests
from orca_jax.link.changes.pauses import Pauses
from orca_jax.link.changes.weights import WeightUpdates
from orca_jax.link.engine_watch import EngineWatch
from orca_jax.link.prepare import ADAPTERS, GRAMMARS, PendingWork, Preparation
from orca_jax.link.watch import ProgressWatch, limit_and_place, step_limit
from orca_jax.link.wire import (
    Abort,
    EngineAnswer,
    EngineCall,
    ForgetPrefixes,
    Heartbeat,
    LoadAdapter,
    Message,
    Pause,
    Phase,
    ReadWeights,
    Ready,
    Rejected,
    ReplaceWeights,
    Resume,
    Sleep,
    Start,
    Submit,
    ToEngine,
    UnloadAdapter,
    Updates,
    WakeUp,
    Watch,
)
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Constraint, RequestUpdate, StructuredOutput
from orca_jax.values.step import ExecutorStats, Handle

SNAPSHOT_SECONDS = 0.25  # between two samples of the statistics while the engine is busy

Compile = Callable[[StructuredOutput], Constraint]
"""Compiles a grammar; raises RequestError."""


@dataclass(frozen=True)
class PreparedWork:
    """A message from another thread to the main thread: what a message needs, or the reason for refusing it."""

    message: Submit | EngineCall
    result: Any  # a Constraint, a ReadAdapter or a PutInPlace; or a RequestError


@dataclass(frozen=True)
class ResultReady:
    """A message from the waiting thread to the main thread: a result that the main thread waits for, or has read."""

    handle: Handle


@dataclass(frozen=True)
class PagesSaved:
    """A message from the thread that saves pages: there is room for more of them."""


ToLoop = ToEngine | PreparedWork | ResultReady | PagesSaved | None
"""None means that the front end has gone."""
Inbox = queue.SimpleQueue[ToLoop]
Send = Callable[[Message], None]


class EngineStatus:
    """The content of heartbeats. The main thread writes and the heartbeat thread reads: fields are replaced whole.

    The main thread counts its messages and its sends here. Together with the engine's own counter they show progress
    everywhere. A step without effect is none, so an engine that turns in vain is found too.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, watch: ProgressWatch | None = None
    ) -> None:
        self._clock = clock
        self._watch = watch or ProgressWatch(clock)
        self._phase: Phase = "loading"
        self._since = clock()  # of the phase
        self._has_work = False
        self._turns = 0
        self._thread = 0
        self._source: Engine | None = None
        self._engine: EngineStats | None = None
        self._executor: ExecutorStats | None = None
        self._next_sample = 0.0
        # grammars and adapters that were given up
        self.late: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def enter(self, phase: Phase) -> None:
        """Note that the main thread begins something long or, with "serving", is ready for work."""
        self._since = self._clock()
        self._phase = phase

    def watch(self, engine: Engine) -> None:
        """Note that the calling thread runs this engine from now on."""
        self._source = engine
        self._thread = threading.get_ident()

    def work(self, *, is_progress: bool = True) -> None:
        """Note that the main thread has work: a message (no progress while a device computes), an update, or a turn."""
        self._turns += is_progress
        self._has_work = True

    def rest(self) -> None:
        """Note that the main thread waits for a message, for any time."""
        self._has_work = False

    def end_step(self, engine: Engine) -> None:
        """Sample the statistics if the last sample is old; called after each step."""
        if self._clock() >= self._next_sample:
            self.sample(engine)

    def sample(self, engine: Engine) -> None:
        """Copy the engine's statistics for the next heartbeats."""
        grammars, adapters = self.late()
        self._engine = dataclasses.replace(
            engine.stats, late_grammars=grammars, late_adapters=adapters
        )
        self._executor = dataclasses.replace(engine.executor.stats)
        self._next_sample = self._clock() + SNAPSHOT_SECONDS

    def heartbeat(self) -> Heartbeat:
        """The message of this moment; called by the heartbeat thread."""
        engine = self._source
        if engine is None or self._phase != "serving":
            return Heartbeat(
                self._phase, max(0.0, self._clock() - self._since), self._engine, self._executor
            )
        turns = self._turns + engine.progress
        busy = self._watch.look(turns if self._has_work else None)
        limit, place = limit_and_place(
            step_limit(engine.executor.expected_seconds), busy, self._thread
        )
        return Heartbeat(self._phase, busy, self._engine, self._executor, limit, place)


def ready_message(built: Built) -> Ready:
    """Describe the engine to a front end."""
    kv = built.engine.pool.kv
    return Ready(
        source=built.directory,
        tokenizer=built.tokenizer.source,
        vocab_size=built.model_config.vocab_size,
        max_model_len=built.max_model_len,
        n_slots=kv.longest_request,
        num_rows=kv.num_rows,
        self_tests={test.implementation: test.result for test in built.self_tests},
        summary=built.summary,
        adapters=tuple(built.engine.pool.adapters.named),
        reads=built.reads,
    )


class EngineLoop:
    """Runs an engine on messages.

    Args:
        engine: owned by the thread that calls `run_engine`.
        inbox: messages of the front end, of the compiling threads and of the thread that waits for results. The
            main thread waits here and nowhere else, unless the pipeline is full.
        send: sends a message to the front end; called by several threads.
        status: updated with the progress of the thread.
        compiler: makes a constraint of a grammar; called by several threads.
        live: observes the engine when the front end watches it; None if no front end does.
        prepare_update: checks new weights; called by a thread.
        reader: reads adapters; called by several threads. None: the engine has none.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        send: Send,
        status: EngineStatus,
        compiler: Compile,
        live: EngineWatch | None = None,
        prepare_update: PrepareUpdate = refuse_toy,
        reader: AdapterReader | None = None,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._updates = WeightUpdates(
            engine, prepare_update, self._report_prepared, send, status.work
        )
        self._pauses = Pauses(engine, send)
        self._held = HeldRequests()
        self._send = send
        self._status = status
        self._compile = compiler
        self._reader = reader
        self._live = live
        self._grammars = Preparation(GRAMMARS)
        self._adapters = Preparation(ADAPTERS)
        self._compiling: dict[str, PendingWork] = {}
        # starts its thread when it is needed
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="result")
        self._awaited: Handle | None = None  # the last iteration given to the waiter
        self._received: deque[ToLoop] = deque()  # by `_wait`, and not taken yet
        # the next request of the same call must come before the next iteration
        self._is_in_call = False
        if engine.outer is not None:
            engine.outer.call_when_saved(partial(inbox.put, PagesSaved()))
        status.late = lambda: (self._grammars.num_late, self._adapters.num_late)
        status.sample(engine)

    def run_engine(self) -> None:
        """Step while there is work, otherwise wait for messages; return when the front end has gone."""
        engine = self._engine
        status = self._status
        status.watch(engine)
        try:
            while self._take_messages():
                updates = engine.step(self._wait)
                status.end_step(engine)
                # a late-found end frees its row without an update
                if updates or not engine.has_work:
                    status.work()
                    self._send_updates(updates)
                    self._make_changes()
        finally:
            self._updates.close()
            self._grammars.close()
            self._adapters.close()
            self._waiter.shutdown(wait=False, cancel_futures=True)

    def _take_messages(self) -> bool:
        """Take messages until an iteration is to be run; False if the front end has gone."""
        engine = self._engine
        status = self._status
        while self._is_resting or self._has_message() or self._is_in_call:
            if self._is_resting and not self._has_message():
                status.sample(engine)  # the state of an idle engine, too
            if self._is_resting:
                status.rest()
            message = self._received.popleft() if self._received else self._inbox.get()
            if message is None:
                return False
            status.work(is_progress=not self._is_computing())
            self._take(message)
            self._make_changes()
        return True

    @property
    def _is_resting(self) -> bool:
        """True if there is no iteration to run."""
        return self._pauses.is_frozen or not self._engine.has_work

    def _wait(self, oldest: Handle) -> bool:
        """Wait for a result or a message, the first one to come; True if it is the result."""
        if self._engine.executor.is_ready(oldest):
            return True
        if self._awaited is not oldest:
            self._awaited = oldest
            self._waiter.submit(self._report, oldest)
        while isinstance(message := self._inbox.get(), ResultReady):
            if message.handle is oldest:  # else a result that a full pipeline has waited for itself
                return True
        self._received.append(message)
        return False

    def _report(self, handle: Handle) -> None:
        """Wait for a result in its own thread, and report it to the main thread, also after a failure."""
        try:
            self._engine.executor.wait(handle)
        finally:
            self._inbox.put(ResultReady(handle))

    def _has_message(self) -> bool:
        return bool(self._received) or not self._inbox.empty()

    def _is_computing(self) -> bool:
        """True if the device still computes the iteration that the main thread waits for."""
        return self._awaited is not None and not self._engine.executor.is_ready(self._awaited)

    def _send_updates(self, updates: list[RequestUpdate]) -> None:
        engine = self._engine
        waiting = engine.num_waiting + len(self._compiling)
        self._send(
            Updates(
                updates,
                running=engine.num_running,
                waiting=waiting,
                weight_version=engine.weight_version,
            )
        )

    def _make_changes(self) -> None:
        """Replace weights or begin a pause, if this is due and all requests sent before have ended."""
        if self._pauses.is_due and (self._is_empty or self._pauses.is_frozen):
            self._pauses.settle()
        if self._updates.is_due and (self._is_empty or self._pauses.is_frozen):
            self._updates.replace()
            self._pauses.sleep.take_weights()
            self._release()

    @property
    def _is_empty(self) -> bool:
        """True if no request is in the engine, or on its way there."""
        return not self._engine.has_work and not self._compiling

    def _release(self) -> None:
        """Add the requests that waited for a change, unless another one is to come."""
        if self._updates.is_due or self._pauses.is_on:
            return
        for submit in self._held.release():
            self._take(submit)

    def _holds(self, message: Submit | Abort) -> bool:
        """True if nothing is left to do with a message, since requests wait for a change."""
        return (self._updates.is_due or self._pauses.is_on) and self._held.take_message(message)

    def _abort_all(self) -> None:
        """End all requests, those with a grammar being compiled included."""
        for request in tuple(self._engine.pool):
            self._engine.abort(request.request_id)
        compiling = self._compiling
        self._compiling = {}
        if compiling:
            self._send_updates([RequestUpdate(request_id, (), "abort") for request_id in compiling])

    def _take(self, message: ToEngine | PreparedWork | ResultReady | PagesSaved) -> None:
        match message:
            case Submit():
                self._submit(message)
            case EngineCall():
                self._begin(message)
            case PreparedWork(Submit() as submit, result):
                self._add_prepared(submit, result)
            case PreparedWork(EngineCall() as call, result):
                self._end_call(call, result)
            case Abort():
                self._abort(message)
            case ResultReady() | PagesSaved():
                # a result has ended a wait, or was collected before
                self._engine.save_pages()
            case Watch(is_on):
                if self._live is not None:
                    self._live.turn(is_on)
            case Start():
                raise ValueError("the engine was started twice")

    def _submit(self, message: Submit) -> None:
        """Add a request, or prepare its grammar first."""
        self._is_in_call = message.has_more
        if self._holds(message):
            return
        structured = message.params.structured
        if structured is None:
            self._add(message, None)
            return
        self._compiling[message.request_id] = self._grammars.submit(
            partial(self._compile, structured), partial(self._report_prepared, message)
        )

    def _add_prepared(self, submit: Submit, result: Constraint | RequestError) -> None:
        """Add a request with its grammar, unless it was aborted in the meantime."""
        if self._compiling.pop(submit.request_id, None) is None:
            return
        if isinstance(result, RequestError):
            self._reject(submit.request_id, result)
        else:
            self._add(submit, result)
        self._send_counts_at_rest()

    def _abort(self, message: Abort) -> None:
        if self._holds(message):
            return
        compiling = self._compiling.pop(message.request_id, None)
        if compiling is None:
            self._engine.abort(message.request_id)
        else:
            self._grammars.cancel(compiling)
            self._send_counts_at_rest()

    def _send_counts_at_rest(self) -> None:
        """Send the counts without a request whose grammar was compiled, if no step will send them."""
        if not self._engine.has_work:
            self._send_updates([])

    def _add(self, submit: Submit, constraint: Constraint | None) -> None:
        try:
            self._engine.add_request(
                submit.request_id,
                submit.prompt_ids,
                submit.params,
                constraint,
                submit.urgency,
                submit.adapter,
                submit.resumed,
            )
        except RequestError as error:
            self._reject(submit.request_id, error)

    def _report_prepared(self, message: Submit | EngineCall, result: Any) -> None:
        """Pass the result of a message's preparation to the main thread; called by other threads."""
        self._inbox.put(PreparedWork(message, result))

    def _begin(self, call: EngineCall) -> None:
        """Prepare the change of a call in another thread, or make it."""
        match call.change:
            case LoadAdapter(name, path):
                self._adapters.submit(
                    partial(self._read_adapter, name, path), partial(self._report_prepared, call)
                )
            case UnloadAdapter(name):
                self._answer(call.number, partial(self._engine.remove_adapter, name))
            case ForgetPrefixes():
                self._answer(call.number, self._engine.forget_prefixes)
            case ReadWeights() as wanted:
                self._updates.read(call, wanted)
            case ReplaceWeights(aborts):
                self._replace_weights(call.number, aborts=aborts)
            case Pause() as wanted:
                self._pauses.begin(call.number, wanted)
                if wanted.mode == "abort":
                    self._abort_all()
            case Resume() | Sleep() | WakeUp() as change:
                self._answer(call.number, partial(self._change_pause, change))

    def _change_pause(self, change: Resume | Sleep | WakeUp) -> None:
        """Let the engine sleep, or go on if nothing sleeps. Raises RequestError."""
        self._pauses.take_change(change)
        self._release()

    def _replace_weights(self, number: int, *, aborts: bool) -> None:
        if self._pauses.is_frozen:
            self._send_updates(self._engine.vacate())  # of the old weights
        self._updates.begin(number)
        if aborts:
            self._abort_all()

    def _end_call(self, call: EngineCall, result: Any) -> None:
        """Make the change of a call after its preparation."""
        if isinstance(call.change, ReadWeights):
            self._answer(call.number, partial(self._updates.keep, result))
        else:
            self._answer(call.number, partial(self._add_adapter, result))

    def _answer(self, number: int, change: Callable[[], str | None]) -> None:
        """Make a change, and answer its call. The text that it returns is a note."""
        try:
            note = change()
        except RequestError as error:
            self._send(EngineAnswer(number, error.message, error.param))
        else:
            self._send(EngineAnswer(number, note=note or ""))

    def _read_adapter(self, name: str, path: str) -> ReadAdapter:
        if self._reader is None:
            raise RequestError(
                "this engine has no adapters; start it with enable_lora", param="lora_name"
            )
        return self._reader(name, path)

    def _add_adapter(self, result: ReadAdapter | RequestError) -> str:
        if isinstance(result, RequestError):
            raise result
        result.add_to(self._engine)
        return result.note

    def _reject(self, request_id: str, error: RequestError) -> None:
        self._send(Rejected(request_id, error.message, error.param))
