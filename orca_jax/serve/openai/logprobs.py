"""Log probabilities in the formats of completions and chats, and in vLLM's format for prompts."""

import codecs
from collections.abc import Collection, Sequence

from orca_jax.serve.openai.schema.answers import (
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.request import TokenLogprobs

LEAST = -9999.0  # stands for minus infinity, which JSON lacks, as in OpenAI's API and vLLM


class CompletionLogprobsWriter:
    """Formats the tokens of one text as they arrive. `text_offset` counts the characters before each token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden = hidden  # ids that the text leaves out
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take_tokens(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Format the next tokens. The log probability of a text's first token is None."""
        tokens = [token_name(self._tokenizer, i) for i in ids]
        return CompletionLogprobs(
            tokens,
            [None if one is None else clipped(one.logprob) for one in logprobs],
            [
                None if one is None else self._top(i, one)
                for i, one in zip(ids, logprobs, strict=True)
            ],
            [self._advance(i) for i in ids],
        )

    def _top(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the chosen one."""
        top: dict[str, float] = {}
        for i, logprob in zip(one.top_ids[: self._num_top], one.top_logprobs, strict=False):
            # of equal spellings, the most probable
            top.setdefault(token_name(self._tokenizer, i), clipped(logprob))
        top.setdefault(token_name(self._tokenizer, token_id), clipped(one.logprob))
        return top

    def _advance(self, token_id: int) -> int:
        spelled = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        # a new character: an incomplete one before it becomes U+FFFD
        if spelled and not 0x80 <= spelled[0] < 0xC0:
            self._offset += len(self._utf8.decode(b"", True))
        before = self._offset
        self._offset += len(self._utf8.decode(spelled))
        return before


def chat_logprobs(
    tokenizer: Tokenizer, num_top: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[TokenLogprob]:
    """Log probabilities of generated tokens, with one entry per token."""

    def entry(token_id: int, one: TokenLogprobs) -> TokenLogprob:
        tops = zip(one.top_ids[:num_top], one.top_logprobs, strict=False)
        return TokenLogprob(
            token_name(tokenizer, token_id),
            clipped(one.logprob),
            list(tokenizer.token_bytes(token_id)),
            [
                TopLogprob(
                    token_name(tokenizer, i), clipped(logprob), list(tokenizer.token_bytes(i))
                )
                for i, logprob in tops
            ],
        )

    return [entry(token_id, one) for token_id, one in zip(ids, logprobs, strict=True)]


def prompt_logprobs(
    tokenizer: Tokenizer, num_top: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """Prompt log probabilities in vLLM's format: null for the first token, then maps by id with the token itself."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {
            "logprob": clipped(logprob),
            "rank": rank,
            "decoded_token": token_name(tokenizer, token_id),
        }

    shaped: PromptLogprobs = [None]
    for token_id, one in zip(ids[1:], logprobs, strict=True):
        entries = {str(token_id): entry(token_id, one.logprob, one.rank)}
        tops = zip(one.top_ids[:num_top], one.top_logprobs, strict=False)
        for rank, (top_id, logprob) in enumerate(tops, start=1):
            entries.setdefault(str(top_id), entry(top_id, logprob, rank))
        shaped.append(entries)
    return shaped


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token. A token with an incomplete character is given by its bytes, as in OpenAI's API."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode() if spelled else f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def clipped(logprob: float) -> float:
    """The log probability, at least `LEAST`, so that it fits into JSON."""
    return max(logprob, LEAST)
