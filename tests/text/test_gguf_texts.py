"""Tokenizers and chat templates in GGUF files: the ids of other libraries, and refusals by name.

`sentence_piece.json` has a vocabulary that the library sentencepiece has trained, with its ids of some texts.
The file of a real model is tested by tests/smollm2.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from orca_jax.assembly.described import tokenizer_of
from orca_jax.text.template_files import read_templates
from orca_jax.text.tokenizer import FileTokenizer, load_tokenizer
from orca_jax.values.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
SPM = json.loads((FIXTURES / "sentence_piece.json").read_text(encoding="utf-8"))
TEXTS = [
    "It's 2026; they'll pay $1,234.50!",
    "  naïve CAFÉ — “Don't”\r\n\n\tx ",
    "漢字かな交じり文 🙂👩‍👩‍👧",
    "WE'RE camelCase HTTPServer a/b/",
    "cafe\u0301 ½ ² ١٢٣ 12345",
    "",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(LLAMA3.replace("{1,3}", "")),
    "gpt-4o": split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def write(path: Path, **fields: Any) -> Path:
    """Write a file without tensors. `fields` are those of the tokenizer, and may be None for none."""
    writer = GGUFWriter(path, "llama")
    add_fields(writer, **fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_fields(writer: GGUFWriter, **fields: Any) -> None:
    for key, value in fields.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        match value:
            case None:
                pass
            case list():
                writer.add_array(name, value)
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case _:
                writer.add_string(name, value)


def trained(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level tokenizer of the library, and its fields in a GGUF file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token == "<|end|>" else 1 for token in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    return tokenizer, {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
    }


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_byte_level_tokenizer_has_the_ids_of_its_library(tmp_path: Path, pre: str) -> None:
    theirs, fields = trained(pre)
    ours = load_tokenizer(write(tmp_path / "a.gguf", **fields, eos_token_id=0, add_bos_token=False))
    for text in [*TEXTS, "Hi<|end|> there"]:
        assert ours.encode(text) == theirs.encode(text).ids, text
        if pre != "qwen2":  # which composes characters
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert (ours.bos_id, ours.eos_id, ours.special_ids, ours.vocab_size) == (
        None,
        0,
        {0},
        theirs.get_vocab_size(),
    )


def spm_file(path: Path, **changes: Any) -> FileTokenizer:
    names = {"tokens": SPM["tokens"], "scores": SPM["scores"], "token_type": SPM["types"]}
    return FileTokenizer(str(write(path / "a.gguf", **{"model": "llama", **names, **changes})))


def test_a_sentence_piece_tokenizer_has_the_ids_of_its_library(tmp_path: Path) -> None:
    ours = spm_file(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (1, 2) and ours.special_ids == {0, 1, 2, 3}
    for text, ids in SPM["texts"].items():
        assert ours.encode(text) == [1, *ids], text
        assert ours.decode(ids) == (f" {text}" if text else "")
    hello, world = ours.encode("hello", False), ours.encode(" world", False)
    assert ours.encode("<|user|>hello<|user|> world", False) == [4, *hello, 4, *world], (
        "as llama.cpp"
    )


def test_flags_of_a_file_decide_about_special_tokens_and_the_first_blank(tmp_path: Path) -> None:
    ours = spm_file(
        tmp_path, add_bos_token=False, add_eos_token=True, add_space_prefix=False, eos_token_id=3
    )
    expected = SPM["texts"][" two  blanks   and more "]
    assert ours.encode(" two") == [*spm_file(tmp_path).encode("two", False), 3]
    assert ours.encode("  two  blanks   and more ", False) == expected


def test_templates_are_those_of_the_file(tmp_path: Path) -> None:
    names = {"model": "llama", "tokens": SPM["tokens"], "scores": SPM["scores"]}
    path = str(
        write(tmp_path / "a.gguf", **names, chat_template="a", **{"chat_template.tool_use": "b"})
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert read_templates(path, None) == ({"default": "a", "tool_use": "b"}, tokens)
    own = tmp_path / "own.jinja"
    own.write_text("c")
    assert read_templates(path, str(own)) == ({"default": "c"}, tokens)
    assert read_templates(str(write(tmp_path / "b.gguf", **names)), None)[0] == {}, "a base model"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": None}, "tokens must be a list of values of the type str, got None"),
        ({"tokens": [1, 2]}, "tokens must be a list of values of the type str"),
        ({"tokens": ["a", "b", "a"]}, "tokens must not repeat a token"),
        ({"token_type": [1]}, "token_type has 1 values, and there are 2 tokens"),
        ({"scores": None}, "scores must be a list of values of the type float, got None"),
        ({"eos_token_id": 2}, "eos_token_id must be the id of a token, got 2"),
        ({"model": "t5"}, "model must be gpt2 or llama, got 't5'"),
        ({"model": "gpt2"}, "pre must be one of command-r, "),
        ({"model": "gpt2", "pre": "viking"}, "got 'viking'"),
        (
            {"model": "gpt2", "pre": "gpt-2", "merges": ["a c"]},
            "is not a tokenizer that can be read",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    plain = {
        "model": "llama",
        "tokens": ["a", "b"],
        "scores": [0.0, 1.0],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    path = write(tmp_path / "a.gguf", **{**plain, "unknown_token_id": 0, **changes})
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    assert (
        caught.value.param == "tokenizer"
        and str(path) in caught.value.message
        and reason in caught.value.message
    )


def test_a_file_that_cannot_be_read_is_that_of_the_setting_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    for wanted, param in ((None, "model"), (str(path), "tokenizer")):
        with pytest.raises(
            ConfigError, match="No such file or directory; check the path"
        ) as caught:
            tokenizer_of(wanted, str(path))
        assert caught.value.param == param and str(path) in caught.value.message
