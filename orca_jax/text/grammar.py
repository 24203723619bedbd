"""Compiles structured outputs to constraints on the next token id, with llguidance.

Compilation and each mask have a limit of steps ("fuel"). A malicious grammar is rejected, or ends its own request, in
well under a second.
"""

import json
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from orca_jax.text.composed import composed_source
from orca_jax.text.schemas.keywords import WrongSchemaError
from orca_jax.text.schemas.prepared import MAX_SCHEMA, prepared
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.errors import RequestError, is_panic
from orca_jax.values.request import StructuredOutput, TokenSet, token_set

if TYPE_CHECKING:  # this name exists only for type checkers
    from llguidance._lib import JsonCompileOptions

PARAM = "structured_outputs"
MAX_SOURCE = 64 * 1024  # characters of a regular expression, a list of choices or a grammar
# characters of all parts of a composed output, each of them within its own limit
MAX_COMPOSED = 4 * MAX_SCHEMA
MAX_REASON = 300  # characters of the library's error to repeat

# Without unlimited blanks, with an error for unknown keywords, and without \uXXXX: the library would take such a
# spelling of a listed name for another name, whose value is free.
_COMPACT: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
_SIZES = {"json_schema": 2 * MAX_SCHEMA, "composed": MAX_COMPOSED}
_REMEDIES = {
    "json_object": "report this as a bug of the server",
    "json_schema": "correct the schema, and leave out unsupported keywords",
    "regex": "correct the expression, without look-around and backreferences, or make it smaller",
    "choice": "give fewer or shorter choices",
    "composed": "correct it, and leave out unsupported keywords",
    "grammar": "correct the grammar, in the Lark syntax of llguidance, or make it smaller",
}


class GrammarFactory:
    """Compiles structured outputs. It is thread-safe.

    The vocabulary is prepared at the first request; a large one takes some tenths of a second.

    Args:
        tokenizer: maps ids to bytes.
        vocab_size: number of ids of the model.
        eos_ids: end tokens, allowed once the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, TokenSet] | None = None

    def compile(self, structured: StructuredOutput) -> "GrammarConstraint":
        """Return a new constraint for one request.

        Raises:
            RequestError: the structure is wrong or too large; `param` is "structured_outputs".
        """
        if not self._eos_ids:
            raise RequestError(
                "structured outputs need an end token, and the config of this model has none",
                param=PARAM,
            )
        _check_size(structured)
        try:
            return self._compile(structured)
        except UnicodeEncodeError:
            raise _refused(
                structured.kind, "it is not valid Unicode: it contains half of a surrogate pair"
            ) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _refused(structured.kind, "the library fails on it") from error

    def _compile(self, structured: StructuredOutput) -> "GrammarConstraint":
        kind = structured.kind
        source = _source(structured)
        vocabulary, known = self._read_vocabulary()
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=_limits())
        matcher.compute_bitmask()  # detects errors that appear only at the first token
        if matcher.is_error():
            raise _refused(kind, _reason(matcher))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise _refused(kind, "no text can match it")
        return GrammarConstraint(matcher, known)

    def _read_vocabulary(self) -> tuple[LLTokenizer, TokenSet]:
        """Return the vocabulary of llguidance, and the set of ids known to both the tokenizer and the model."""
        with self._lock:
            if self._vocabulary is None:
                ids = _Vocabulary(self._tokenizer, self._eos_ids)
                reader = LLTokenizer(TokenizerWrapper(ids), eos_token=sorted(self._eos_ids))
                known = [
                    i
                    for i, spelling in enumerate(ids.tokens[: self._vocab_size])
                    if spelling or i in self._eos_ids
                ]
                self._vocabulary = reader, token_set(known)
            return self._vocabulary


class GrammarConstraint:
    """A `Constraint` of one request, with the state of its parser."""

    def __init__(self, matcher: LLMatcher, known: TokenSet) -> None:
        self._matcher = matcher
        self._known = known

    def allowed(self) -> TokenSet:
        """Return the allowed next ids; if the text is complete and cannot continue, only the end tokens.

        Raises:
            RequestError: the parser has exceeded its limits.
        """
        tokens = int.from_bytes(self._matcher.compute_bitmask(), "little") & self._known
        if self._matcher.is_error():
            raise RequestError(
                f"the structure of the output became too complex: {_reason(self._matcher)}",
                param=PARAM,
            )
        return tokens

    def accept(self, token_id: int) -> None:
        """Advance by one id; an error appears at the next `allowed`."""
        self._matcher.consume_token(token_id)


class _Vocabulary:
    """A tokenizer with the interface of llguidance: the bytes of each id are exactly those in the text."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        size = max(tokenizer.vocab_size, max(eos_ids) + 1)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self._special = tokenizer.special_ids | set(eos_ids)
        self.special_token_ids = sorted(self._special)
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._ids = {
            spelling: i for i, spelling in enumerate(self.tokens) if i not in self._special
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a forced piece of text: those of the tokenizer, if they decode to exactly this text."""
        try:
            ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        except RequestError:  # the tokenizer fails on this text
            return self._greedy(text)
        if b"".join([self.tokens[i] for i in ids]) == text and self._special.isdisjoint(ids):
            return ids
        # the text is a special token or not UTF-8, or the tokenizer adds a blank
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            length = next((n for n in lengths if text[at : at + n] in self._ids), None)
            if length is None:
                break
            ids.append(self._ids[text[at : at + length]])
            at += length
        return ids


def _limits() -> LLParserLimits:
    """Return the default limits of the library with less memory per grammar, and errors without the parser state."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _source(structured: StructuredOutput) -> str:
    """Return the grammar for llguidance."""
    kind = structured.kind
    value = structured.value
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_COMPACT)
    if kind == "json_schema":
        schema = _read_json(kind, value)
        if not isinstance(schema, dict):
            raise _refused(kind, "a schema must be a JSON object")
        return LLMatcher.grammar_from_json_schema(_json_text(_enforced(schema)), overrides=_COMPACT)
    if kind == "composed":
        try:
            return composed_source(value, _part_source)
        except RequestError:  # of a part; it is a ValueError, too
            raise
        except ValueError as error:
            raise _refused(kind, str(error)) from None
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_regex(_regex_of_choices(_read_json(kind, value)))
    return LLMatcher.grammar_from_lark(value)


def _enforced(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        whole = prepared(schema)
    except WrongSchemaError as error:
        raise _refused("json_schema", str(error)) from None
    for path, reason in whole.left_out.items():
        raise _refused("json_schema", f"{path[:MAX_REASON]}: {reason}")
    return whole.schema


def _part_source(part: StructuredOutput) -> str:
    """Return the grammar of a part for llguidance."""
    _check_size(part)
    return _source(part)


def _check_size(structured: StructuredOutput) -> None:
    size = len(structured.value)
    most = _SIZES.get(structured.kind, MAX_SOURCE)
    if size > most:
        raise RequestError(
            f"{structured.kind} has {size} characters, and must have at most {most}", param=PARAM
        )


def _regex_of_choices(choices: object) -> str:
    if not isinstance(choices, list) or not choices:
        raise RequestError("choice must be a list of at least one string", param=PARAM)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("choice must be a list of non-empty strings", param=PARAM)
    return "|".join(_literal(choice) for choice in choices)


def _literal(text: str) -> str:
    """Return a regular expression for one text, with all special characters as code points."""
    text.encode()  # raises an error for half of a surrogate pair
    return "".join(
        char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _read_json(kind: str, value: str) -> Any:
    try:
        return json.loads(value, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise _refused(kind, f"it is not JSON: {error}") from None


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_text(schema: object) -> str:
    # Encoded here, since the library accepts any text as JSON, but not every value.
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise _refused("json_schema", "it contains a number that is too large") from None
    text.encode()  # raises an error for half of a surrogate pair
    return text


def _reason(matcher: LLMatcher) -> str:
    """Return the error of the library on one line."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").split("\n")
    reason = " ".join(" ".join(lines).split())[:MAX_REASON]
    return "no text can match it" if reason.startswith("NoExtension") else reason


def _refused(kind: str, reason: str) -> RequestError:
    name = "the format, or the schema of a strict tool," if kind == "composed" else kind
    return RequestError(f"{name} cannot be used: {reason}; {_REMEDIES[kind]}", param=PARAM)
