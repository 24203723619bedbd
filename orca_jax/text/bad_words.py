"""Converts bad words to token ids, before the engine receives the parameters of a request."""

from collections.abc import Sequence
from dataclasses import replace

from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams


def engine_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters for the engine: with bad words as ids, and without stop strings.

    `OutputStream` finds the stop strings.

    Raises:
        RequestError: a bad word has no ids; `param` is "bad_words".
    """
    if not params.stop and not params.bad_words:
        return params
    bad = (*params.bad_token_ids, *bad_word_ids(tokenizer, params.bad_words))
    return replace(params, stop=(), bad_words=(), bad_token_ids=bad)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of words, at the beginning of a text and after a blank, as in vLLM.

    A word is forbidden only as the tokens that the tokenizer gives for it. Other tokens that spell the same letters
    stay allowed.

    Raises:
        RequestError: a word has no ids; `param` is "bad_words".
    """
    found: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        plain = _ids(tokenizer, word.lstrip())
        after_blank = _ids(tokenizer, " " + word.lstrip())
        if not plain or not after_blank:
            raise RequestError(
                f"bad_words: {word!r} has no tokens, so it cannot be forbidden; leave it out",
                "bad_words",
            )
        found[plain] = None
        if after_blank[-len(plain) :] != plain:  # else forbidden already
            found[after_blank] = None
    return tuple(found)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except RequestError as error:
        raise RequestError(
            f"bad_words: {text!r} has no tokens ({error.message}); leave it out", "bad_words"
        ) from error
