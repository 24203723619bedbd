"""Tokenizers behind one protocol, which is based on bytes.

An id may stand for a part of a character, so a tokenizer maps an id to *bytes*. Decoding joins these bytes. This makes
incremental decoding exact by construction (`stream.py`), without comparisons of strings.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

from orca_jax.errors import ConfigError, RequestError, is_panic
from orca_jax.text.settings_file import read_settings

MAX_TOKENIZER_BYTES = 256 * 2**20  # of a tokenizer.json; the largest known ones have 35 MB
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
    """Load a tokenizer: a directory with `tokenizer.json`, such a file, or "byte".

    Raises:
        ConfigError: the tokenizer is missing or cannot be used; `param` is "tokenizer".
    """
    return ByteTokenizer() if source == BYTE_TOKENIZER else FileTokenizer(str(source))


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
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")


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
        return bytes((token_id,)) if 0 <= token_id < 256 else b""


class FileTokenizer(_BytesDecoder):
    """A `tokenizer.json` with a byte-level vocabulary (GPT-2, Llama 3) or a SentencePiece one with byte fallback."""

    is_bounded = False

    def __init__(self, source: str) -> None:
        path = Path(source)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json at {source}", param="tokenizer")
        decoder = read_settings(path, "tokenizer", MAX_TOKENIZER_BYTES).get("decoder")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises a bare Exception for most bad files, and panics for some
            raise ConfigError(f"{path} is not a tokenizer that can be read: {error}", param="tokenizer") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_level = _is_byte_level(decoder, path)
        self._bytes: dict[int, bytes] = {}
        self.source = source
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        settings = read_settings(path.with_name("tokenizer_config.json"), "tokenizer")
        self.bos_id = self._named(settings.get("bos_token"))
        self.eos_id = self._named(settings.get("eos_token"))

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
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return token.encode("utf-8") if token_id in self._added else token.replace("▁", " ").encode("utf-8")

    def _named(self, token: object) -> int | None:
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if isinstance(content, str) else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            "the prompt is not valid Unicode: it contains half of a surrogate pair", param="prompt"
        ) from None


def _refused(text: str, error: BaseException) -> RequestError:
    message = f"the tokenizer fails on a text of {len(text)} characters: {error}; shorten or change the text"
    return RequestError(message, param="prompt")


def _is_byte_level(decoder: dict[str, object] | None, path: Path) -> bool:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return True
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    found = ", ".join(sorted(kinds)) or "none"
    message = f"{path} must be a byte-level or SentencePiece tokenizer, and its decoders are: {found}"
    raise ConfigError(message, param="tokenizer")


def _decoder_kinds(decoder: dict[str, object] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return {kind for part in inner for kind in _decoder_kinds(part)}
    return {str(decoder.get("type"))}


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the alphabet of GPT-2: printable Latin-1 bytes are themselves, the other 68 are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
