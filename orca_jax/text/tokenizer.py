"""Tokenizers behind one protocol, which is based on bytes.

An id may stand for a part of a character, so a tokenizer maps an id to *bytes*. Decoding joins these bytes. This makes
incremental decoding exact by construction (`stream.py`), without comparisons of strings.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from orca_jax.helpers.bundled import is_gguf
from orca_jax.text.gguf_texts import tokenizer_of_gguf
from orca_jax.text.settings_file import read_settings
from orca_jax.values.errors import ConfigError, RequestError, is_panic

MAX_TOKENIZER_BYTES = 64 * 2**20  # of a tokenizer.json; the largest known ones have 35 MB
# of a vocabulary, and of its merges; the largest known ones have 260,000 and 520,000
MAX_TOKENS = 1_000_000
MAX_ADDED_TOKENS = 100_000
MAX_PARTS = 100_000  # values in the other parts of the file together
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTE_TOKENIZER = "byte"  # the source of `ByteTokenizer`, given in place of a path


class Tokenizer(Protocol):
    """Converts text to ids and back.

    `source` is the argument of `load_tokenizer` to build an equal tokenizer, also in another process.
    `vocab_size` is the number of ids of the tokenizer; a model may have more rows.
    `is_bounded` is True if the time of `encode` follows from the length of the text; a tokenizer file may hold regular
    expressions, and these may take any time.
    """

    source: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]
    is_bounded: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt. `add_special_tokens` adds the special tokens of the tokenizer, such as BOS.

        Raises:
            RequestError: the text is not valid Unicode (it contains half of a surrogate pair), or the tokenizer fails.
        """
        ...

    @property
    def longest_token(self) -> int:
        """The largest number of bytes of a token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of an id within a text; an unknown id has none."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids within a longer text; bytes that are not UTF-8 become U+FFFD.

        The blank of SentencePiece vocabularies before a first word is kept, since the ids continue a text.
        """
        ...


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load a tokenizer: a directory with `tokenizer.json`, a file in its format, a GGUF file, or "byte".

    Raises:
        ConfigError: the tokenizer is missing or cannot be used; `param` is "tokenizer", or "model" for a GGUF file that
            cannot be read.
    """
    if source == BYTE_TOKENIZER:
        return ByteTokenizer()
    return FileTokenizer(str(source))


def check_characters(text: str, max_tokens: int, tokenizer: Tokenizer) -> None:
    """Refuse a text that must have more tokens than this: encoding it could take minutes.

    Raises:
        RequestError: the text is too long; `param` is "prompt".
    """
    if len(text) > max_tokens and len(text) > (limit := max_tokens * tokenizer.longest_token):
        message = f"the prompt has {len(text)} characters, and {max_tokens} tokens of the context hold at most {limit}"
        raise RequestError(f"{message}; shorten it", param="prompt")


class _BytesDecoder:
    """Implements `decode` for all tokenizers: join the bytes, then decode them as UTF-8."""

    special_ids: frozenset[int]
    vocab_size: int

    @cached_property
    def longest_token(self) -> int:
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode(
            "utf-8", "replace"
        )


class ByteTokenizer(_BytesDecoder):
    """A tokenizer for presets and tests: ids 0 to 255 are bytes, and 256 is the end token."""

    is_bounded = True

    def __init__(self) -> None:
        self.source = BYTE_TOKENIZER
        self.vocab_size = 257
        self.bos_id: int | None = None
        self.eos_id: int | None = 256
        self.special_ids = frozenset({256})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the UTF-8 bytes of the text, without special tokens."""
        return list(_utf8(text))

    def token_bytes(self, token_id: int) -> bytes:
        """Return one byte, or `<|end|>` for the end token."""
        if token_id == 256:
            return b"<|end|>"
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return b""


class FileTokenizer(_BytesDecoder):
    """A `tokenizer.json` with a byte-level vocabulary (GPT-2, Llama 3) or a SentencePiece one with byte fallback.

    Or such a tokenizer in a GGUF file.
    """

    is_bounded = False

    def __init__(self, source: str) -> None:
        path, content, roles = _contents(source)
        _check_numbers(content, path)
        decoder = content.get("decoder")
        try:
            if is_gguf(source):
                self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
            else:
                del content  # before the library reads the file
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        # the library raises a bare Exception for most bad files, and panics for some
        except BaseException as error:
            raise ConfigError(
                f"{path} is not a tokenizer that can be read: {error}", param="tokenizer"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_level, self._steps = _spelling(decoder, path)
        self._bytes: dict[int, bytes] = {}
        self.source = source
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        if roles is None:
            roles = read_settings(path.with_name("tokenizer_config.json"), "tokenizer")
        self.bos_id = self._named(roles.get("bos_token"))
        self.eos_id = self._named(roles.get("eos_token"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt. The library releases the interpreter lock meanwhile."""
        _utf8(text)
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:
            raise _refused(text, error) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _refused(text, error) from error

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id, from a cache if possible."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        # The library takes unsigned 32-bit ids only, and a model with random weights may be padded beyond them.
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode("utf-8")  # the text of an added token is used as it is
        for step in self._steps:  # they apply to added tokens too, as in the library
            byte = _BYTE.fullmatch(token) if step is None else None
            if byte:
                return bytes((int(byte[1], 16),))
            if step is not None:
                token = step(token)
        return token.encode("utf-8")

    def _named(self, token: object) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            return None
        return self._tokenizer.token_to_id(content)


def _contents(source: str) -> tuple[Path, Mapping[str, Any], Mapping[str, Any] | None]:
    """The file of a tokenizer, its contents, and the special tokens if they are in the same file."""
    path = Path(source)
    if is_gguf(source):
        return path, *tokenizer_of_gguf(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        message = f"no tokenizer.json at {source}; save the tokenizer as a fast one, or give another as tokenizer"
        raise ConfigError(message, param="tokenizer")
    return path, read_settings(path, "tokenizer", MAX_TOKENIZER_BYTES), None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            "the prompt is not valid Unicode: it contains half of a surrogate pair", param="prompt"
        ) from None


def _check_numbers(content: Mapping[str, Any], path: Path) -> None:
    """Check the numbers of entries, before the library builds its tables of them."""
    model = content.get("model")
    parts = model if isinstance(model, dict) else {}
    others = {key: value for key, value in content.items() if key not in ("model", "added_tokens")}
    others |= {key: value for key, value in parts.items() if key not in ("vocab", "merges")}
    limits = {
        "vocab": (_length(parts.get("vocab")), MAX_TOKENS),
        "merges": (_length(parts.get("merges")), MAX_TOKENS),
        "added_tokens": (_length(content.get("added_tokens")), MAX_ADDED_TOKENS),
        "parts": (_num_values(others, MAX_PARTS), MAX_PARTS),
    }
    for name, (number, most) in limits.items():
        if number > most:
            message = f"{path} has more than {most} {name}; name another tokenizer with --tokenizer"
            raise ConfigError(message, param="tokenizer")


def _refused(text: str, error: BaseException) -> RequestError:
    message = f"the tokenizer fails on a text of {len(text)} characters: {error}; shorten or change the text"
    return RequestError(message, param="prompt")


def _length(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    return len(value)


def _num_values(value: object, most: int) -> int:
    """The number of values inside `value`; the count ends soon after `most`."""
    pending = [value]
    count = 0
    while pending and count <= most:
        inner = pending.pop()
        if isinstance(inner, dict | list):
            count += len(inner)
            pending += inner.values() if isinstance(inner, dict) else inner
    return count


Steps = tuple[Callable[[str], str] | None, ...]
"""The steps from a token of SentencePiece to its text, in order. None stands for the tokens of single bytes."""


def _spelling(decoder: object, path: Path) -> tuple[bool, Steps]:
    """Return True for a byte-level vocabulary, and else False and the steps of its decoders."""
    parts = list(_decoders(decoder))
    kinds = {str(part.get("type")) for part in parts}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return True, ()
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise _unusable(path, f"its decoders are: {', '.join(sorted(kinds)) or 'none'}")
    steps: list[Callable[[str], str] | None] = []
    is_whole = False  # from Fuse on, a decoder has the whole text
    for part in parts:
        match part:
            case {"type": "ByteFallback"}:
                steps.append(None)
            case {"type": "Metaspace", "replacement": str(mark)}:
                steps.append(partial(_replaced, old=mark, new=" "))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(
                old
            ) == 1 or (old and not is_whole):
                steps.append(partial(_replaced, old=old, new=new))
            case {"type": "Fuse"}:
                is_whole = True
            case {"type": "Strip"} if is_whole:
                pass  # at the ends of a text, and ids continue a text
            case _:
                raise _unusable(path, f"a decoder is {str(part)[:200]}")
    return False, tuple(steps)


def _decoders(decoder: object) -> Iterator[Mapping[str, Any]]:
    """The decoders in the order of their use. The depth is limited by the parser of the library, which ran before."""
    if not isinstance(decoder, dict):
        return
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        for part in inner:
            yield from _decoders(part)
    else:
        yield decoder


def _replaced(token: str, old: str, new: str) -> str:
    return token.replace(old, new)


def _unusable(path: Path, found: str) -> ConfigError:
    message = f"{path} must be a byte-level or SentencePiece tokenizer, and {found}; name another one with --tokenizer"
    return ConfigError(message, param="tokenizer")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the alphabet of GPT-2: printable Latin-1 bytes are themselves, the other 68 are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
