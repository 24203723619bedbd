"""Text: exact byte decoding, pieces that join to the whole text, and stop strings across borders."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from orca_jax.text import tokenizer as tokenizer_module
from orca_jax.text.bad_words import bad_word_ids, engine_params
from orca_jax.text.stream import IncrementalDecoder, OutputStream, StopMatcher
from orca_jax.text.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    check_characters,
    load_tokenizer,
)
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import SamplingParams
from tests.text.hostile import PANICS, REASON, write_hostile_tokenizer

CORPUS = [
    "the cat sat on the mat",
    "déjà vu, naïve café",
    "漢字かな交じり文",
    "👩‍👩‍👧 🙂🙃",
    "x = {1: 'a'}\n\ttab",
] * 4


def _byte_level(path: Path) -> Path:
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["»plain added«"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "bos_token": None})
    )
    return path


def _sentencepiece(path: Path) -> Path:
    tokens = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(str(_byte_level(tmp_path_factory.mktemp("bpe"))))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(str(_sentencepiece(tmp_path_factory.mktemp("spm"))))


def _check_stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    decoder, pieces, at = IncrementalDecoder(tokenizer), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(decoder.push(ids[at : at + cut]))
        at = min(at + cut, len(ids))
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + decoder.finish() == whole
    # Half a character would be U+FFFD, so the pieces so far must always be a beginning of the whole text.
    assert all(whole.startswith("".join(pieces[:n])) for n in range(len(pieces) + 1))


chunks = st.lists(st.integers(0, 3), max_size=60)


@given(st.lists(st.integers(0, 260), max_size=60), chunks)
def test_byte_pieces_join_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    _check_stream(ByteTokenizer(), ids, cuts)


@settings(deadline=None)
@given(data=st.data())
def test_bpe_pieces_join_to_the_whole_and_to_the_library(
    bpe: FileTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size + 2), max_size=60))
    _check_stream(bpe, ids, data.draw(chunks))
    library = HFTokenizer.from_file(str(Path(bpe.source) / "tokenizer.json"))
    known = [i for i in ids if i < bpe.vocab_size]
    for skip in (True, False):
        assert bpe.decode(known, skip_special_tokens=skip) == library.decode(
            known, skip_special_tokens=skip
        )


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_round_trip(bpe: FileTokenizer, spm: FileTokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), bpe, spm):
        assert tokenizer.decode(tokenizer.encode(text.replace("▁", "_"))) == text.replace("▁", "_")


def test_no_piece_ends_in_half_a_character(bpe: FileTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        text = "naïve 漢字 👩‍👩‍👧!"
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push([i]) for i in tokenizer.encode(text)]
        assert "�" not in "".join(pieces) and "".join(pieces) == text and decoder.finish() == ""
    decoder = IncrementalDecoder(ByteTokenizer())
    assert decoder.push(list("é".encode())[:1]) == "" and decoder.finish() == "�"


def test_special_and_unknown_ids(bpe: FileTokenizer) -> None:
    assert bpe.eos_id is not None and bpe.bos_id is None
    assert bpe.decode([bpe.eos_id, *bpe.encode("a"), 10**6, -1, 2**40]) == "a"
    assert bpe.decode([bpe.eos_id], skip_special_tokens=False) == "<|end|>"


def test_sentencepiece_bytes_and_blanks(spm: FileTokenizer) -> None:
    assert spm.encode(" ab")[-1] == spm.vocab_size - 1
    assert spm.decode(spm.encode(" ab ab")) == " ab ab"
    decoder = IncrementalDecoder(spm)
    assert [decoder.push([i]) for i in spm.encode("é")] == ["", "é"]


def test_unusable_tokenizers_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(str(tmp_path / "missing"))
    assert caught.value.param == "tokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer that can be read"):
        load_tokenizer(str(tmp_path))
    _byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_tokenizer(str(tmp_path))
    tokenizer = HFTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(str(tmp_path))
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


def _cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: search again after every character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


letters = st.text(alphabet="abc", min_size=1, max_size=4)


@given(
    st.lists(letters, min_size=1, max_size=4),
    st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
)
def test_stop_strings_do_not_see_borders(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces)
    expected, stopped = _cut("".join(pieces), stops)
    assert matcher.stopped == stopped
    assert out + matcher.finish() == expected


def test_output_stream_ends() -> None:
    ids = list(b"one two")
    by_token = OutputStream(ByteTokenizer())
    assert by_token.push(ids) + by_token.push([*b"!", 33], "stop") == "one two!"
    assert (by_token.finish_reason, by_token.num_tokens) == ("stop", 9)
    by_length = OutputStream(ByteTokenizer(), stops=["two.", "zzz"])
    assert [by_length.push(ids), by_length.push([], "length")] == ["one ", "two"]
    by_string = OutputStream(ByteTokenizer(), stops=["e t"])
    assert by_string.push(ids) == "on"
    assert (by_string.finish_reason, by_string.num_tokens) == ("stop", 5)
    assert by_string.push(ids, "length") == "" and by_string.finish_reason == "stop"


@given(
    st.lists(letters, min_size=1, max_size=4),
    st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
)
def test_included_stop_strings_end_the_text(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=True)
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    before, stopped = _cut("".join(pieces), stops)
    assert matcher.stopped == stopped
    assert out == before + (matcher.stop or "")
    assert not stopped or (matcher.stop in stops and out.endswith(matcher.stop or "?"))


@pytest.mark.parametrize(
    ("min_tokens", "end"), [(0, 2), (1, 2), (2, 5), (3, 5), (4, 5), (5, 8), (8, 11)]
)
def test_stop_strings_wait_for_min_tokens(min_tokens: int, end: int) -> None:
    """ "ab" ends at tokens 2, 5, 8 and 11; an occurrence that ends within `min_tokens` is text."""
    stream = OutputStream(ByteTokenizer(), ["ab"], min_tokens=min_tokens)
    out = "".join(stream.push([token]) for token in b"abcabcabcab")
    assert (out, stream.num_tokens, stream.stop_reason) == ("abcabcabcab"[: end - 2], end, "ab")


@pytest.mark.parametrize(
    ("settings", "text", "stop_reason"),
    [
        ({}, "ab", None),
        ({"stop_token_ids": (256,)}, "ab", 256),
        ({"include_stop": True}, "ab", None),
        ({"include_stop": True, "skip_special_tokens": False}, "ab<|end|>", None),
        ({"skip_special_tokens": False}, "ab", None),
        ({"include_stop": True, "stops": ["<|"], "skip_special_tokens": False}, "ab<|end|>", None),
    ],
)
def test_end_tokens_in_the_text(settings: dict, text: str, stop_reason: int | None) -> None:
    stream = OutputStream(ByteTokenizer(), **settings)
    assert stream.push([97]) + stream.push([98, 256], "stop") == text
    assert (stream.num_tokens, stream.finish_reason, stream.stop_reason) == (3, "stop", stop_reason)


def test_special_tokens_within_the_text() -> None:
    assert OutputStream(ByteTokenizer()).push([97, 256, 98]) == "ab"
    assert (
        OutputStream(ByteTokenizer(), skip_special_tokens=False).push([97, 256, 98]) == "a<|end|>b"
    )


def test_the_stream_of_parameters() -> None:
    params = SamplingParams(
        stop=("b",),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=1,
        stop_token_ids=(99,),
    )
    assert OutputStream.for_params(ByteTokenizer(), params).push([98, 256, 98, 98]) == "b<|end|>b"
    by_token = OutputStream.for_params(ByteTokenizer(), params)
    assert by_token.push([97, 99], "stop") == "ac"
    assert by_token.stop_reason == 99


def test_prompts_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = HFTokenizer.from_file(str(_byte_level(tmp_path) / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("the cat") == [end, *loaded.encode("the cat", add_special_tokens=False)]
    assert ByteTokenizer().encode("a", add_special_tokens=False) == [97]


def test_bad_words_as_they_begin_a_text_and_after_a_blank(bpe: FileTokenizer) -> None:
    found = bad_word_ids(bpe, ["cat", " cat", "déjà"])
    assert [bpe.decode(ids) for ids in found] == ["cat", " cat", "déjà"], (
        "after a blank déjà has the same ids"
    )
    assert len(set(found)) == len(found), "each once"
    assert bad_word_ids(ByteTokenizer(), [" ab"]) == ((97, 98),), (
        "after a blank the ids are the same"
    )


@pytest.mark.parametrize("word", [" ", "\n", "half \ud800"])
def test_what_is_no_bad_word(word: str) -> None:
    with pytest.raises(RequestError) as caught:
        bad_word_ids(ByteTokenizer(), [word])
    assert caught.value.param == "bad_words"


def test_parameters_for_the_engine() -> None:
    plain = SamplingParams(min_tokens=1, include_stop_str_in_output=True)
    assert engine_params(plain, ByteTokenizer()) is plain
    params = SamplingParams(stop=("x",), bad_words=("ab",), bad_token_ids=((7,),), seed=4)
    assert engine_params(params, ByteTokenizer()) == SamplingParams(
        bad_token_ids=((7,), (97, 98)), seed=4
    )


PIECES = [
    "a",
    "▁▁▁",
    "b",
    "x▁y",
    "<0xZZ>",
    "<0x41>",
    "<s▁>",
    "▁a",
    "<0xé>",
    "▁",
    "_",
    "<0xC3>",
    "<0xA9>",
]
SENTENCEPIECE = {
    "Llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "Mistral": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "T5": decoders.Metaspace(prepend_scheme="never"),
    "another mark": decoders.Sequence(
        [decoders.Metaspace(replacement="_", prepend_scheme="never"), decoders.Fuse()]
    ),
    "several": decoders.Sequence(
        [decoders.Replace("▁▁", "--"), decoders.Replace("▁", " "), decoders.Fuse()]
    ),
}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_added_tokens_are_decoded_as_by_the_library(tmp_path: Path, name: str) -> None:
    """transformers decodes with the library; there the decoders apply to added tokens, and bytes have a decoder."""
    path = _sentencepiece(tmp_path) / "tokenizer.json"
    library = HFTokenizer.from_file(str(path))
    library.decoder = SENTENCEPIECE[name]
    library.add_tokens(PIECES)
    library.add_special_tokens(["<s▁>"])
    library.save(str(path))
    ours = load_tokenizer(str(path))
    ids = [library.token_to_id(piece) for piece in PIECES]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == library.decode(
            ids, skip_special_tokens=skip
        )
    _check_stream(ours, ids, [1] * len(ids))


UNUSABLE = {
    "an expression": {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
    "each token stripped": {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    "text after bytes": {
        "type": "Sequence",
        "decoders": [
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            {"type": "Replace", "pattern": {"String": "a"}, "content": "b"},
        ],
    },
    "a pattern over tokens": {
        "type": "Sequence",
        "decoders": [
            {"type": "Fuse"},
            {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"},
        ],
    },
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_decoders_without_support_are_refused(tmp_path: Path, name: str) -> None:
    """Each id has bytes of its own here, so decoders over several tokens cannot be followed."""
    path = _sentencepiece(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": UNUSABLE[name]}))
    with pytest.raises(
        ConfigError, match=r"must be a byte-level or SentencePiece tokenizer.*--tokenizer"
    ) as caught:
        load_tokenizer(str(path))
    assert caught.value.param == "tokenizer"


@pytest.mark.parametrize(
    ("limit", "change", "part"),
    [
        ("MAX_TOKENS", {}, "vocab"),
        ("MAX_TOKENS", {"model": {"type": "BPE", "vocab": {}, "merges": ["a b"] * 9}}, "merges"),
        ("MAX_ADDED_TOKENS", {"added_tokens": [{}] * 9}, "added_tokens"),
        (
            "MAX_PARTS",
            {"normalizer": {"type": "Sequence", "normalizers": [[0, 0, 0]] * 3}},
            "parts",
        ),
    ],
)
def test_the_parts_of_a_tokenizer_are_limited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    change: dict[str, object],
    part: str,
) -> None:
    """Checked before the library reads the file, since its tables are large."""
    path = _sentencepiece(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    monkeypatch.setattr(tokenizer_module, limit, 8)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json has more than 8 {part}"):
        load_tokenizer(str(path))


def test_a_panic_of_the_tokenizer_is_an_error_of_its_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(write_hostile_tokenizer(tmp_path))
    with pytest.raises(
        RequestError, match=f"fails on a text of {len(PANICS)} characters: .*{REASON}"
    ) as caught:
        tokenizer.encode(PANICS)
    assert caught.value.param == "prompt"
    assert tokenizer.encode("abab") == [0, 1, 0, 1], "it can still be used"
    with pytest.raises(RequestError, match=REASON) as caught:
        bad_word_ids(tokenizer, ["b", PANICS])
    assert caught.value.param == "bad_words"
    capfd.readouterr()  # the library writes its panics to standard error


@pytest.mark.parametrize(("characters", "fits"), [(10, True), (70, True), (71, False)])
def test_a_text_with_more_characters_than_the_context_can_hold_is_refused(
    characters: int, fits: bool
) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.longest_token == len("<|end|>")
    if fits:
        check_characters("x" * characters, 10, tokenizer)
        return
    with pytest.raises(
        RequestError,
        match="71 characters, and 10 tokens of the context hold at most 70; shorten it",
    ):
        check_characters("x" * characters, 10, tokenizer)
