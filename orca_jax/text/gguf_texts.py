"""The tokenizer of a GGUF file in the form of a tokenizer.json, and its chat templates.

Such a file has the vocabulary as lists. Of a byte-level tokenizer it has the merges, and a name for the way to split a
text into words, whose meaning is the code of llama.cpp (src/llama-vocab.cpp). The patterns here are those of the
tokenizers which these names stand for. Of a SentencePiece tokenizer it has scores, from which the merges follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from orca_jax.helpers.gguf_file.header import read_fields
from orca_jax.values.checks import short
from orca_jax.values.errors import ConfigError

_BEGIN = "tokenizer.ggml."
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPM_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # unless the file says otherwise, as in llama.cpp
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_BLANK = "\u2581"  # SentencePiece's form of a blank
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}|"
    r"\p{{N}}{most}|{others}"
)
_OF_CASES = {"upper": _UPPER, "lower": _LOWER, "others": _OTHERS.replace(r"\r\n]*", r"\r\n/]*")}


class _Words(NamedTuple):
    """The way to split texts into words.

    Attributes:
        patterns: one after the other; each match is a word.
        adds_begin: True if a text begins with the begin token, unless the file says otherwise.
        takes_whole: True if a word of the vocabulary becomes one token, whatever the merges give.
        composes: True if characters and their marks become one (NFC).
    """

    patterns: tuple[str, ...]
    adds_begin: bool = False
    takes_whole: bool = False
    composes: bool = False


_WORDS = {
    **dict.fromkeys(("gpt-2", "olmo"), _Words((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Words((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), _Words((_LLAMA3,), adds_begin=True, takes_whole=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Words((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Words((_QWEN2,), composes=True)),
    "tekken": _Words((_CASED.format(**_OF_CASES, end="", most=""),), takes_whole=True),
    "gpt-4o": _Words((_CASED.format(**_OF_CASES, end=f"{_SHORTENED}?", most="{1,3}"),)),
}


@dataclass(frozen=True)
class _TokenLists:
    """The vocabulary of a file: its tokens in order of their ids, and their types."""

    path: Path
    fields: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: it cannot be read (`param` is "model"), or has no vocabulary (`param` is "tokenizer").
        """
        fields = read_fields(path)
        found = cls(path, fields, [], [])
        tokens = found.listed("tokens", str)
        # An empty token cannot be found in a text. It gets a name, as each needs one.
        found.tokens.extend(token or f"[EMPTY_{index}]" for index, token in enumerate(tokens))
        if len(set(found.tokens)) != len(tokens):
            raise found.wrong("tokens", "must not repeat a token")
        if f"{_BEGIN}token_type" in fields:
            found.types.extend(found.beside_tokens("token_type", int))
        else:
            found.types.extend([_NORMAL] * len(tokens))
        return found

    def wrong(self, key: str, reason: str) -> ConfigError:
        message = f"{self.path}: {_BEGIN}{key} {reason}; name another tokenizer with --tokenizer"
        return ConfigError(message, param="tokenizer")

    def listed[T](self, key: str, kind: type[T]) -> list[T]:
        found = self.fields.get(_BEGIN + key)
        if not isinstance(found, list) or any(type(value) is not kind for value in found):
            raise self.wrong(
                key, f"must be a list of values of the type {kind.__name__}, got {short(found)}"
            )
        return found

    def beside_tokens[T](self, key: str, kind: type[T]) -> list[T]:
        found = self.listed(key, kind)
        if len(found) != len(self.tokens):
            raise self.wrong(
                key, f"has {len(found)} values, and there are {len(self.tokens)} tokens"
            )
        return found

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.fields.get(_BEGIN + key, default))

    def named(self, role: str) -> int | None:
        """The id of the token with a role, such as "bos"."""
        key = f"{role}_token_id"
        default = None
        if self.fields.get(f"{_BEGIN}model") == "llama":
            default = _SPM_IDS.get(role)
        found = self.fields.get(_BEGIN + key, default)
        if found is not None and not (type(found) is int and 0 <= found < len(self.tokens)):
            raise self.wrong(key, f"must be the id of a token, got {short(found)}")
        return found

    @property
    def roles(self) -> dict[str, str]:
        """The texts of the tokens with roles, by their names in a tokenizer_config.json."""
        ids = {name: self.named(role) for name, role in _ROLES.items()}
        return {name: self.tokens[index] for name, index in ids.items() if index is not None}


def tokenizer_of_gguf(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The contents of a tokenizer.json, and the special tokens of a tokenizer_config.json.

    Raises:
        ConfigError: the file cannot be read, or has a tokenizer of another kind; `param` is "tokenizer".
    """
    vocabulary = _TokenLists.of(path)
    kind = vocabulary.fields.get(f"{_BEGIN}model")
    if kind == "gpt2":
        parts = _byte_level(vocabulary)
    elif kind == "llama":
        parts = _sentence_piece(vocabulary)
    else:
        raise vocabulary.wrong("model", f"must be gpt2 or llama, got {short(kind)}")
    skips_blanks = kind == "llama" and vocabulary.fields.get("general.architecture") == "phi3"
    added = [
        {
            "id": index,
            "content": token,
            "special": kind != _USER_DEFINED,
            "single_word": False,
            "lstrip": False,
            # as llama.cpp knows of Phi-3, whose files do not say it
            "rstrip": skips_blanks and kind == _CONTROL,
            "normalized": False,
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {"version": "1.0", "added_tokens": added, **parts}, vocabulary.roles


def templates_of_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The chat templates of a file by their names, and the special tokens. Raises ConfigError as above."""
    vocabulary = _TokenLists.of(path)
    begin = "tokenizer.chat_template"
    templates = {
        key.removeprefix(begin).removeprefix(".") or "default": value
        for key, value in vocabulary.fields.items()
        if (key == begin or key.startswith(f"{begin}.")) and isinstance(value, str)
    }
    if "default" not in templates:
        templates = {}
    return templates, vocabulary.roles


def _byte_level(vocabulary: _TokenLists) -> dict[str, Any]:
    name = vocabulary.fields.get(f"{_BEGIN}pre")
    if not isinstance(name, str) or name not in _WORDS:
        raise vocabulary.wrong(
            "pre", f"must be one of {', '.join(sorted(_WORDS))}, got {short(name)}"
        )
    words = _WORDS[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    merges = [_pair(merge) for merge in vocabulary.listed("merges", str)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": {"type": "NFC"} if words.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _template(vocabulary, words.adds_begin),
        "decoder": byte_level,
        "model": _model(vocabulary, merges, ignore_merges=words.takes_whole),
    }


def _sentence_piece(vocabulary: _TokenLists) -> dict[str, Any]:
    marks = [{"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}]
    if vocabulary.flag("add_space_prefix", True):
        marks.insert(0, {"type": "Prepend", "prepend": _BLANK})
    texts = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
    ]
    unknown = vocabulary.roles.get("unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": marks},
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary, adds_begin=True),
        "decoder": {"type": "Sequence", "decoders": [*texts, {"type": "Fuse"}]},
        "model": _model(
            vocabulary, _merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _merges(vocabulary: _TokenLists) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, the one with the highest score first."""
    scores = vocabulary.beside_tokens("scores", float)
    rows = enumerate(zip(vocabulary.tokens, scores, vocabulary.types, strict=True))
    known = {token: (-score, index) for index, (token, score, kind) in rows if kind == _NORMAL}
    found = []
    for token, order in known.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in known and right in known:
                found.append((order, known[left][1], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _model(
    vocabulary: _TokenLists, merges: Sequence[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    return {"type": "BPE", "dropout": None, "vocab": ids, "merges": merges, **options}


def _template(vocabulary: _TokenLists, adds_begin: bool) -> dict[str, Any] | None:
    """The special tokens around a text."""
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    parts = [text]
    ids = {}
    for role, is_added in (("bos", adds_begin), ("eos", False)):
        index = vocabulary.named(role)
        if index is not None and vocabulary.flag(f"add_{role}_token", is_added):
            token = vocabulary.tokens[index]
            part = {"SpecialToken": {"id": token, "type_id": 0}}
            parts = [part, *parts] if role == "bos" else [*parts, part]
            ids[token] = {"id": token, "ids": [index], "tokens": [token]}
    if not ids:
        return None
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, second],
        "special_tokens": ids,
    }
