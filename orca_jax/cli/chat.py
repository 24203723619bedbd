"""`orca-jax chat`: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Sequence

from orca_jax.cli.sampling import text_parser, text_source
from orca_jax.cli.source import PlainMessage, TextSource
from orca_jax.flags import FlagParser
from orca_jax.values.errors import RequestError

DESCRIPTION = "Talk to a model. From a file or a pipe, each line is one message."
PROMPT = "> "
COMMANDS = """\
/clear         forget the conversation
/undo          forget the last message and its answer
/system TEXT   set the system message, and forget the conversation
/help          show these commands
/exit          end (also Ctrl-D)
Ctrl-C stops an answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer messages of standard input until its end. Returns the exit status. Raises OrcaError."""
    parser = make_parser()
    system = parser.parse_args(argv).system
    is_terminal = sys.stdin.isatty()
    with text_source(parser, argv) as model:
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - edits and recalls lines of `input`
            print(f"{model.name}. /help lists the commands.")
        conversation = TerminalChat(model, system)
        while (line := _read_line(is_terminal)) is not None:
            if not conversation.take_line(line.strip()):
                break
    return 0 if conversation.num_failed == 0 or is_terminal else 1


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = text_parser("chat", "[MODEL] [flags]", DESCRIPTION, max_tokens=256, has_word=True)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    return parser


def _read_line(is_terminal: bool) -> str | None:
    """The next line, or None at the end of the input."""
    try:
        return input(PROMPT if is_terminal else "")
    except EOFError:
        if is_terminal:
            print()
    except KeyboardInterrupt:
        print()
    return None


class TerminalChat:
    """A conversation: it prints answers, and keeps the messages.

    Args:
        model: answers.
        system: the system message; None for none.
    """

    def __init__(self, model: TextSource, system: str | None) -> None:
        self._model = model
        self.messages: list[PlainMessage] = []
        self.num_failed = 0
        self._set_system(system)

    def take_line(self, line: str) -> bool:
        """Run a command or answer a message. Returns False after the last one."""
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/clear":
            self._set_system(self._system)
        elif command == "/undo":
            del self.messages[max(len(self.messages) - 2, bool(self._system)) :]
        elif command == "/system":
            self._set_system(rest.strip() or None)
        elif command == "/help":
            print(COMMANDS)
        elif line.startswith("/"):
            print(f"there is no command {command}; /help lists them")
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._model.answer(self.messages):
                print(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except RequestError as error:
            self.messages.pop()
            self.num_failed += 1
            print(f"error: {error.message}; /clear begins a new conversation", file=sys.stderr)
            return
        print()
        self.messages.append({"role": "assistant", "content": answer})

    def _set_system(self, text: str | None) -> None:
        self._system = text
        self.messages = [] if text is None else [{"role": "system", "content": text}]
