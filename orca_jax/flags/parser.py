"""A parser of flags: suggestions for misspelt ones, a short help, and a file of settings."""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from orca_jax.flags.habits import in_own_words
from orca_jax.flags.program import EXIT_USAGE
from orca_jax.flags.settings_file import file_of, read_settings, values_of
from orca_jax.flags.vllm import dashed, translated
from orca_jax.values.checks import did_you_mean

CONFIG = "config"
_HELP_FLAGS = ("-h", "--help")


class _Help(argparse.Action):
    """Prints the short help; with a value, all flags, those of a group, or those with a word in their names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option_string: Any = None,
    ) -> None:
        assert isinstance(parser, FlagParser)
        parser.print_help_of(values)
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """A parser without abbreviations. It suggests flags and values for misspelt ones.

    Args:
        args: the arguments of `argparse.ArgumentParser`.
        brief: the settings in the short help, in addition to positional arguments; None: `--help` shows all flags.
        options: the options of `argparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, brief: Collection[str] | None = None, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "add_help": brief is None, **options})
        self._words: Sequence[str] = ()
        self._brief = brief
        # values that replace the defaults, by the names of the settings
        self._settings: dict[str, Any] = {}
        self._files: dict[str, Mapping[str, Any]] = {}  # values of the files read so far
        self.takes_vllm = False  # vLLM's flags without an effect here are taken, and named once
        self._named: set[str] = set()
        if brief is not None:
            text = "show this help; --help=all: all flags; --help=WORD: the flags of a group, or with a word in a name"
            self.add_argument(
                "-h",
                "--help",
                action=_Help,
                nargs="?",
                metavar="WORD",
                default=argparse.SUPPRESS,
                help=text,
            )

    def add_config_flag(self) -> None:
        """Add `--config`, the file of settings. Afterwards parsing raises ConfigError for a wrong file."""
        if not self._has_config:
            text = "YAML file of flags, such as 'max-num-seqs: 8'; the command line overrides it"
            self.add_argument(f"--{CONFIG}", metavar="FILE", help=text)

    def use_settings(self, settings: Mapping[str, object], origin: str) -> None:
        """Let these settings replace the defaults, as those of a `--config` file do.

        Raises:
            ConfigError: a name is unknown, or a value is wrong; the message begins with `origin`.
        """
        self._settings |= values_of(self, settings, origin)

    def print_help_of(self, word: str | None) -> None:
        """Print the short help, or the help of the flags that `word` selects. Ends the process if there are none."""
        shown = [action for action in self._actions if self._is_selected(action, word)]
        if not shown:
            groups = ", ".join(group.title or "" for group in self._action_groups[2:])
            self.error(
                f"argument --help: no flag and no group has the word {word!r}; groups: {groups}, all"
            )
        texts = [(action, action.help) for action in self._actions if action not in shown]
        for action, _ in texts:
            action.help = argparse.SUPPRESS
        try:
            self.print_help()
        finally:
            for action, text in texts:
                action.help = text

    def _is_selected(self, action: argparse.Action, word: str | None) -> bool:
        if word == "all":
            return True
        if word is None:
            return not action.option_strings or action.dest in (*(self._brief or ()), "help")
        group = next(
            (group.title for group in self._action_groups if action in group._group_actions), None
        )
        return word == group or any(
            word.strip("-").replace("_", "-") in flag for flag in action.option_strings
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with the settings of `--config` and `use_settings` in place of the defaults.

        Raises:
            ConfigError: the file cannot be read, or a setting in it is unknown or wrong; `param` is "config".
        """
        self._words = self._translated(list(sys.argv[1:] if args is None else args))
        settings = {**self._settings, **self._settings_of_file()}
        if settings:
            namespace = argparse.Namespace() if namespace is None else namespace
            vars(namespace).update(settings)
            for action in self._actions:
                action.required = action.required and action.dest not in settings
            for group in self._mutually_exclusive_groups:
                dests = [action.dest for action in group._group_actions]
                group.required = group.required and settings.keys().isdisjoint(dests)
        return super().parse_known_args(self._words, namespace)

    def _translated(self, words: list[str]) -> list[str]:
        if not self.takes_vllm:
            end = words.index("--") if "--" in words else len(words)
            return [*map(dashed, words[:end]), *words[end:]]
        try:
            words, habits = in_own_words(words, self._option_string_actions)
            kept, dropped = translated(words, self._option_string_actions)
        except ValueError as error:
            self.exit(EXIT_USAGE, f"error: {error}\n")
        self.name_ignored([*habits, *dropped])
        return kept

    def name_ignored(self, flags: Sequence[str]) -> None:
        """Name flags that have no effect here on standard error, each once."""
        if new := sorted(set(flags) - self._named):
            self._named.update(new)
            print(f"no effect here, as docs/vllm.md explains: {', '.join(new)}", file=sys.stderr)

    @property
    def _has_config(self) -> bool:
        return any(action.dest == CONFIG for action in self._actions)

    def _settings_of_file(self) -> Mapping[str, Any]:
        path = file_of(self._words, f"--{CONFIG}") if self._has_config else None
        if path is None or any(word.partition("=")[0] in _HELP_FLAGS for word in self._words):
            return {}
        if path not in self._files:  # read once: it may be a pipe
            self._files[path] = read_settings(self, path)
        return self._files[path]

    def error(self, message: str) -> NoReturn:
        """Print the message with a suggestion on one line, and end the process with code 2."""
        message = self.hinted(message)
        remedy = "" if message.endswith("?") else f"; {self.prog} --help lists the flags"
        self.exit(EXIT_USAGE, f"error: {message}{remedy}\n")

    def hinted(self, message: str) -> str:
        """Return the message of an error with suggestions for misspelt flags."""
        # the word may be the value of one of them
        if "argument MODEL" in message and (unknown := self._unknown()):
            message = f"unrecognized arguments: {' '.join(unknown)}"
        has_misspelt = message.startswith(
            ("unrecognized arguments", "the following arguments are required")
        )
        return message + self._suggestions() if has_misspelt else message

    def given(self, argv: Sequence[str] | None = None) -> frozenset[str]:
        """Return the names of the settings with a flag on the command line; their values may be the defaults."""
        missing = object()
        names = {action.dest: missing for action in self._actions}
        parsed = vars(self.parse_args(argv, argparse.Namespace(**names)))
        return frozenset(name for name, value in parsed.items() if value is not missing)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, error.message + did_you_mean(value, action.choices or ())
            ) from None

    def _unknown(self) -> list[str]:
        """The flags that this parser does not have."""
        known = self._known_flags()
        words = [word.partition("=")[0] for word in self._words]
        return [
            word for word in words if word.startswith("--") and word not in known and word != "--"
        ]

    def _known_flags(self) -> list[str]:
        known = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = [parser for name, parser in action.choices.items() if name in self._words]
                known += [flag for parser in chosen for flag in parser._option_string_actions]
        return known

    def _suggestions(self) -> str:
        known = self._known_flags()
        return "".join(
            f"; {word}: {hint[2:]}"
            for word in self._unknown()
            if (hint := did_you_mean(word, known))
        )
