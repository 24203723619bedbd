"""Renders conversations to prompts by chat templates, in processes that cannot harm the server.

A template comes with the model, and is a program in the language of Jinja. `template_worker.py` compiles and renders
it with limited memory, output and time; a process that exceeds its time is killed and replaced. If something else has
killed a process, perhaps while it was idle, the conversation is rendered once more by another one. Special tokens in a
message of a user are ordinary text for a template, and the tokenizer encodes them as special tokens.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from orca_jax.text import template_worker
from orca_jax.text.json_end import cut_object
from orca_jax.text.template_files import read_templates
from orca_jax.text.template_worker import MAX_OUTPUT, Frame, receive_frame, send_frame
from orca_jax.values.errors import ConfigError, EngineError, RequestError

# per conversation; the limit of processor time is stricter, and a busy machine gives a process little of it
RENDER_SECONDS = 30.0
# to start a process and compile the templates, while the machine loads a model
START_SECONDS = 30.0
END_SECONDS = 1.0  # between the end of a process's socket and its own end
MAX_END = 4096  # characters that a template writes after the last message
NUM_WORKERS = 2  # so that one slow conversation does not delay the others

KEPT_VARIABLES = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TZ",
    "TZDIR",
)
"""The variables of the environment of a process that renders."""

DEFAULT, TOOL_USE = "default", "tool_use"
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


class RenderedTooLong(RequestError):
    """The prompt of a conversation has more than `most` characters."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"messages have more than {most} characters; shorten the conversation", "messages"
        )
        self.most = most


def load_chat_template(source: str, override: str | None) -> "ChatTemplate | None":
    """Compile the chat template of a model, or return None if the model has none. The caller closes the result.

    Args:
        source: the model directory, with chat_template.jinja or tokenizer_config.json; empty or "preset:<name>" for a
            preset, which has a plain template.
        override: a file with another template; the special tokens still come from the directory.

    Raises:
        ConfigError: a file cannot be read, or the template is wrong; `param` is "chat_template".
    """
    templates, tokens = read_templates(source, override)
    if not templates:
        return None
    return ChatTemplate(templates, tokens)


class ChatTemplate:
    """Renders conversations. `render` blocks, and may be called from any thread."""

    def __init__(
        self,
        templates: Mapping[str, str],
        tokens: Mapping[str, str],
        render_seconds: float = RENDER_SECONDS,
    ) -> None:
        """Start a process and compile `templates`. The template "tool_use" is used for conversations with tools.

        Raises:
            ConfigError: a template is wrong; `param` is "chat_template".
        """
        self._templates = dict(templates)
        self._tokens = dict(tokens)
        self._seconds = render_seconds
        self._closed = False
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        # None: a worker that is not started
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(NUM_WORKERS - 1):
            self._idle.put(None)
        self._idle.put(self._start())

    @property
    def tool_source(self) -> str:
        """The source of the template for conversations with tools."""
        return self._templates.get(TOOL_USE, self._templates[DEFAULT])

    def reads(self, name: str) -> bool:
        """True if a template uses a variable of this name."""
        return any(
            re.search(rf"\b{re.escape(name)}\b", source) for source in self._templates.values()
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        max_continued: int = MAX_OUTPUT,
    ) -> str:
        """Return the prompt of a conversation, as `apply_chat_template` of transformers does.

        Args:
            messages: messages in OpenAI's format, with text as content. Arguments of tool calls may be JSON text, and
                templates receive their values.
            tools: tools in OpenAI's format, or None.
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: end within the last message, so that the model continues it.
            kwargs: further variables of the template.
            max_continued: with `continue_final_message`, the most characters of the prompt, and of the part behind it.

        Raises:
            RenderedTooLong: the prompt is too long.
            RequestError: the template rejects the conversation, fails, or exceeds a limit; `param` is "messages".
            EngineError: no process can be started.
        """
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message cannot be combined with add_generation_prompt; set one of them to false"
            raise RequestError(message, param="continue_final_message")
        context = {
            **self._tokens,
            "documents": None,
            **_checked_kwargs(kwargs or {}),
            "messages": [_with_parsed_arguments(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        text = self._exchange({"template": name, "context": context})
        if not continue_final_message:
            return text
        if len(text) > max_continued + MAX_END:  # before the search for the message
            raise RenderedTooLong(max_continued)
        return _cut_after_final_message(text, messages)

    def close(self) -> None:
        """End the processes. Calls of `render` in progress fail."""
        with self._lock:
            self._closed = True
            workers = self._running
            self._running = set()
        for worker in workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _exchange(self, frame: Frame) -> str:
        worker = self._idle.get()
        was_killed = False
        try:
            while True:
                worker = worker or self._start()
                try:
                    answer = worker.exchange(frame, self._seconds)
                    break
                except _WorkerLost as error:
                    self._discard(worker)
                    worker = None
                    _check_killed(error, is_first=not was_killed)
                    was_killed = True
        except ConfigError as error:  # the templates compiled before
            raise EngineError(
                f"the process of the chat template cannot be restarted: {error.message}"
            ) from error
        finally:
            self._idle.put(worker)
        if "is_too_long" in answer:
            raise RenderedTooLong(MAX_OUTPUT)
        if "error" in answer:
            raise RequestError(
                f"the chat template rejects this conversation: {answer['error']}", "messages"
            )
        return str(answer["text"])

    def _start(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise EngineError("the chat template was closed")
            worker = _Worker()
            self._running.add(worker)
        try:
            problem = worker.exchange({"templates": self._templates}, START_SECONDS).get("error")
        except _WorkerLost as error:
            problem = f"compiling it {error}"
        if problem is not None:
            self._discard(worker)
            raise ConfigError(f"the chat template cannot be used: {problem}", param="chat_template")
        return worker

    def _discard(self, worker: "_Worker") -> None:
        with self._lock:
            self._running.discard(worker)
        worker.close()


def _check_killed(error: "_WorkerLost", *, is_first: bool) -> None:
    """Refuse the conversation unless a process was killed from outside while it rendered it, for the first time."""
    if not is_first or not error.was_killed:
        message = f"the chat template {error}; shorten the conversation"
        raise RequestError(message, param="messages") from None


class _WorkerLost(Exception):
    """A process ended or was too slow. The message is the predicate of "the chat template".

    With `was_killed` it ended by a signal from outside, such as that of a system without memory.
    """

    def __init__(self, message: str, *, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class _Worker:
    """A process that renders one conversation at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # The script is started by its path, so this package is not imported. -P keeps modules in its folder from hiding
        # others of the same names. A new session protects it from Ctrl-C in a terminal.
        command = [sys.executable, "-P", str(Path(template_worker.__file__))]
        null = subprocess.DEVNULL
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=null,
                    stderr=null,
                    start_new_session=True,
                    env=_environment(),
                )
            except OSError as error:
                ours.close()
                raise EngineError(
                    f"the process of the chat template cannot be started: {error.strerror}"
                ) from error
        self._socket = ours

    def exchange(self, frame: Frame, seconds: float) -> Frame:
        """Send a frame, and return the answer with "text" or "error".

        Raises:
            RequestError: the frame cannot be encoded as JSON.
            _WorkerLost: there is no answer, and the process cannot be used any more.
        """
        deadline = time.monotonic() + seconds

        def left() -> float:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            return remaining

        try:
            self._socket.settimeout(left())
            send_frame(self._socket, frame)
            answer = receive_frame(self._socket, left)
        except TimeoutError:
            raise _WorkerLost(f"took longer than {seconds:g} s") from None
        except (RecursionError, TypeError, UnicodeError) as error:
            raise RequestError(
                f"messages cannot be encoded as JSON: {error}", param="messages"
            ) from None
        except OSError:
            answer = None
        except ValueError as error:
            raise _WorkerLost(f"has too large an input or output: {error}") from None
        if answer is None:
            raise _WorkerLost(
                "needed too much memory or processor time", was_killed=self._was_killed()
            )
        return answer

    def _was_killed(self) -> bool:
        """True if the process has ended by a signal other than that of its limit of processor time."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it has only closed its socket
            return False
        return code < 0 and code != -signal.SIGXCPU

    def close(self) -> None:
        """Kill the process. May be called twice, and from another thread."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _environment() -> dict[str, str]:
    """The variables that Python needs to start and to show the local time, without tokens of the server."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    reserved = sorted(RESERVED & set(kwargs))
    if reserved:
        message = f"chat_template_kwargs must not hold {', '.join(reserved)}; use the fields of the request"
        raise RequestError(message, param="chat_template_kwargs")
    return kwargs


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with parsed arguments of tool calls. OpenAI has JSON text, and templates expect values.

    Arguments that a limit has cut are closed: a client may send the message of a cut answer back.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": _parsed(call.get("function") or {})} for call in calls],
    }


def _parsed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": json.loads(arguments) if arguments.strip() else {}}
    except (ValueError, RecursionError):
        cut = cut_object(arguments)
        if cut is not None:
            return {**function, "arguments": cut}
        message = f"the arguments of the tool call {function.get('name')!r} must be JSON"
        raise RequestError(message, param="messages") from None


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut the prompt at the end of the last message, with its trailing blanks if the template keeps them."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs text as content of the last message", param="messages"
        )
    words = content.strip()
    # Backwards by `find`, whose time is linear: `rfind` compares a long text at every place of another one.
    behind = text[::-1].find(words[::-1])
    if behind < 0:
        message = "the chat template changes the last message, so it cannot be continued"
        raise RequestError(message, param="continue_final_message")
    start = len(text) - behind - len(words)
    kept = content.lstrip()
    end = len(kept) if text.startswith(kept, start) else len(words)
    return text[: start + end]
