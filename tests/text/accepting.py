"""Texts that a constraint allows, with a tokenizer of bytes."""

from collections.abc import Mapping

from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.request import StructuredOutput


class WithTokens(ByteTokenizer):
    """The tokenizer of bytes with further special tokens, from id 257 on."""

    def __init__(self, tokens: Mapping[int, str]) -> None:
        super().__init__()
        self._tokens = tokens
        self.vocab_size += len(tokens)
        self.special_ids |= frozenset(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return (
            self._tokens[token_id].encode()
            if token_id in self._tokens
            else super().token_bytes(token_id)
        )


def accepts(structured: StructuredOutput, text: str | list[int], tokenizer: ByteTokenizer) -> bool:
    """True if a text may be generated, and may end there."""
    constraint = GrammarFactory(tokenizer, tokenizer.vocab_size, [256]).compile(structured)
    for token_id in list(text.encode()) if isinstance(text, str) else text:
        if not constraint.allowed() >> token_id & 1:
            return False
        constraint.accept(token_id)
    return bool(constraint.allowed() >> 256 & 1)
