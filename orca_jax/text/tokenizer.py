"""Tokenizers behind one protocol whose currency is bytes.

Half a character is a thing of bytes, so a tokenizer here says which *bytes* an id stands for. Decoding is joining
them, which makes incremental decoding exact by construction (`stream.py`) instead of a comparison of strings.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers

from orca_jax.errors import ConfigError, RequestError
from orca_jax.text.settings_file import read_settings

MAX_TOKENIZER_BYTES = 256 * 2**20  # of a tokenizer.json; the largest known have 35 MB
BYTE_TOKENIZER = "byte"  # the source that names `ByteTokenizer` where a path is expected


class Tokenizer(Protocol):
    """Strings <-> ids.

    `source` is what `load_tokenizer` takes to build the same tokenizer again, also in another process.
    `vocab_size` counts the ids that the tokenizer may produce; a model may have more rows than that.
    """

    source: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt, with the special tokens that the model's tokenizer puts around one if they are wanted.

        Raises:
            RequestError: the text is no Unicode: it holds half of a surrogate pair.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that an id adds to a text; none for an id that the tokenizer does not know."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text that these ids add to what stands before them; bytes that are no UTF-8 become U+FFFD.

        It continues a text: the blank that SentencePiece vocabularies put before a first word is kept.
        """
        ...


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load a tokenizer: a directory with `tokenizer.json`, such a file, or "byte".

    Raises:
        ConfigError: nothing usable is there; `param` is "tokenizer".
    """
    return ByteTokenizer() if source == BYTE_TOKENIZER else FileTokenizer(str(source))


class _BytesDecoder:
    """`decode` for all tokenizers: join, then read as UTF-8."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")


class ByteTokenizer(_BytesDecoder):
    """Ids 0..255 are bytes and 256 ends a text: for presets without a tokenizer, and for tests."""

    def __init__(self) -> None:
        self.source = BYTE_TOKENIZER
        self.vocab_size = 257
        self.bos_id: int | None = None
        self.eos_id: int | None = 256
        self.special_ids = frozenset({256})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of the text; there is nothing to put around it."""
        return list(_utf8(text))

    def token_bytes(self, token_id: int) -> bytes:
        """One byte; the end token reads `<|end|>` where special tokens are shown."""
        if token_id == 256:
            return b"<|end|>"
        return bytes((token_id,)) if 0 <= token_id < 256 else b""


class FileTokenizer(_BytesDecoder):
    """A `tokenizer.json`: byte-level vocabularies (GPT-2, Llama 3) and SentencePiece ones with byte fallback."""

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
        except BaseException as error:  # the library raises bare Exception for most bad files, and panics at some
            raise ConfigError(f"{path} is no readable tokenizer: {error}", param="tokenizer") from error
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
        """The ids of a prompt. The work is done outside the interpreter lock."""
        _utf8(text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id, remembered."""
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
            return token.encode("utf-8")  # an added token is written as it reads
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
        raise RequestError("the prompt holds half of a surrogate pair, which is no character", param="prompt") from None


def _is_byte_level(decoder: dict[str, object] | None, path: Path) -> bool:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return True
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    message = f"{path} decodes with {sorted(kinds) or 'nothing'}; byte-level and SentencePiece are known"
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
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
