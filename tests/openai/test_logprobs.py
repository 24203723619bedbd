"""Log probabilities in the API's shapes, and that a text is the same however it came."""

from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from orca_jax.link.wire import Submit
from orca_jax.serve.openai.logprobs import (
    LEAST,
    CompletionLogprobsWriter,
    chat_logprobs,
    prompt_logprobs,
    token_name,
)
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.request import TokenLogprobs
from tests.serve.played import News, call, chat, events, update

TOKENIZER = ByteTokenizer()
INFINITE = float("-inf")


def one(logprob: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(logprob, 1, tuple(i for i, _ in top), tuple(p for _, p in top))


@given(st.binary(max_size=12) | st.text(max_size=6).map(str.encode), st.data())
def test_offsets_count_the_characters_before(spelled: bytes, data: st.DataObject) -> None:
    ids = list(spelled)
    writer = CompletionLogprobsWriter(TOKENIZER, 0, frozenset())
    cut = data.draw(st.integers(0, len(ids)))
    parts = [writer.take_tokens(part, [one(-1.0)] * len(part)) for part in (ids[:cut], ids[cut:])]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == sorted(offsets)
    text = TOKENIZER.decode(ids)
    for token_id, offset in zip(ids, offsets, strict=True):
        if token_id < 0x80:
            assert text[offset] == chr(token_id)


def test_the_token_that_came_is_among_the_top_ones() -> None:
    writer = CompletionLogprobsWriter(TOKENIZER, 1, frozenset())
    written = writer.take_tokens([65, 66], [None, one(-2.0, (67, -0.5), (68, -1.0))])
    assert written.top_logprobs == [None, {"C": -0.5, "B": -2.0}] and written.token_logprobs == [
        None,
        -2.0,
    ]


def test_of_ids_with_equal_spelling_the_most_probable_counts() -> None:
    """The map by text has one place for them; the better id comes first."""

    class Doubled(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return super().token_bytes(token_id % 128)

    writer = CompletionLogprobsWriter(Doubled(), 3, frozenset())
    written = writer.take_tokens([65], [one(-3.0, (66, -0.5), (66 + 128, -1.0), (67, -2.0))])
    assert written.top_logprobs == [{"B": -0.5, "C": -2.0, "A": -3.0}]


def test_infinity_is_written_as_a_number() -> None:
    writer = CompletionLogprobsWriter(TOKENIZER, 1, frozenset())
    assert writer.take_tokens([65], [one(INFINITE, (66, INFINITE))]).top_logprobs == [
        {"B": LEAST, "A": LEAST}
    ]
    (entry,) = chat_logprobs(TOKENIZER, 1, [0xE2], [one(INFINITE, (66, -1.0), (67, -2.0))])
    assert msgspec.to_builtins(entry) == {
        "token": "bytes:\\xe2",
        "logprob": LEAST,
        "bytes": [0xE2],
        "top_logprobs": [{"token": "B", "logprob": -1.0, "bytes": [66]}],
    }


def test_prompts_in_vllms_shape() -> None:
    scores = [TokenLogprobs(-3.0, 9, (67, 66), (-1.0, -3.0))]
    shaped = prompt_logprobs(TOKENIZER, 2, [65, 66], scores)
    assert shaped == [
        None,
        {
            "66": {"logprob": -3.0, "rank": 9, "decoded_token": "B"},
            "67": {"logprob": -1.0, "rank": 1, "decoded_token": "C"},
        },
    ]


def test_names_are_told_apart() -> None:
    names = {token_name(TOKENIZER, token_id) for token_id in range(300)}
    assert len(names) == 300


@settings(max_examples=25, deadline=None)
@given(
    st.text(max_size=12),
    st.lists(st.integers(1, 4), max_size=40),
    st.sampled_from([None, "ab", "x"]),
)
def test_however_updates_are_cut_the_text_is_the_same(
    text: str, cuts: list[int], stop: str | None
) -> None:
    """Whole or streamed, with log probabilities or without."""
    ids = list(f"{text}aab{text}x".encode())

    def script(submit: Submit) -> list[News]:
        left, news = list(ids), []
        for size in [*cuts, len(ids)]:
            part, left = left[:size], left[size:]
            logprobs = (
                tuple(one(-1.0 - i) for i in part) if submit.params.logprobs is not None else ()
            )
            news.append(update(submit, *part, logprobs=logprobs))
        return [*news, update(submit, finish_reason="length")]

    expected = bytes(ids).decode()
    if stop is not None:
        expected = expected[: expected.find(stop)]
    for fields in ({}, {"logprobs": 0}):
        given: dict[str, Any] = {"stop": stop, "max_tokens": 100, **fields}
        whole = call(script, **given)[0].json()
        assert whole["choices"][0]["text"] == expected
        chunks = [chunk["choices"][0] for chunk in events(call(script, stream=True, **given)[0])]
        assert "".join(chunk["text"] for chunk in chunks) == expected
        assert chunks[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
        if fields:
            count = whole["usage"]["completion_tokens"]
            assert sum(len(chunk["logprobs"]["tokens"]) for chunk in chunks) == count
            assert len(whole["choices"][0]["logprobs"]["tokens"]) == count


def test_logprobs_of_a_chat_are_of_all_its_tokens() -> None:
    def script(submit: Submit) -> list[News]:
        return [update(submit, *b"hey", 256, logprobs=(one(-1.0),) * 4, finish_reason="stop")]

    answer = chat(script, logprobs=True)[0].json()
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert (
        tokens == ["h", "e", "y", "<|end|>"] and answer["choices"][0]["message"]["content"] == "hey"
    )
