"""What a face turns into ids before the engine sees a request's parameters."""

from collections.abc import Sequence
from dataclasses import replace

from orca_jax.errors import RequestError
from orca_jax.request import SamplingParams
from orca_jax.text.tokenizer import Tokenizer


def engine_params(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters as the engine takes them: bad words as ids, and without stop strings, which `OutputStream` finds.

    Raises:
        RequestError: a bad word has no ids; `param` is "bad_words".
    """
    if not params.stop and not params.bad_words:
        return params
    bad = (*params.bad_token_ids, *bad_word_ids(tokenizer, params.bad_words))
    return replace(params, stop=(), bad_words=(), bad_token_ids=bad)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of words, each as it stands at the beginning of a text and after a blank, as in vLLM.

    These are the ways in which the tokenizer itself writes a word; the same letters in other pieces are not forbidden.

    Raises:
        RequestError: a word has no ids; `param` is "bad_words".
    """
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        plain, after_blank = _ids(tokenizer, word.lstrip()), _ids(tokenizer, " " + word.lstrip())
        if not plain or not after_blank:
            raise RequestError(f"bad_words: {word!r} is no word, so it cannot be forbidden; leave it out", "bad_words")
        found[plain] = None
        if after_blank[-len(plain) :] != plain:  # else forbidden already
            found[after_blank] = None
    return tuple(found)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except RequestError as error:
        raise RequestError(f"bad_words: {text!r} is no Unicode; leave it out", "bad_words") from error
