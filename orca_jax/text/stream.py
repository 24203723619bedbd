"""Decodes ids to text while they arrive, in whole characters, and up to the first stop string."""

import codecs
from collections.abc import Collection, Sequence
from typing import Self

from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.request import FinishReason, SamplingParams


class IncrementalDecoder:
    """Decodes the ids of one request as they arrive.

    The joined pieces, `finish()` included, equal `tokenizer.decode` of all ids. Up to three bytes of an unfinished
    character wait for the next id.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, decodes: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._decodes = decodes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return the text completed by these ids; it may be empty, and is without `decodes`."""
        if not self._decodes:
            return ""
        spell = self._tokenizer.token_bytes
        hidden = self._hidden
        return self._utf8.decode(b"".join(spell(i) for i in ids if i not in hidden))

    def finish(self) -> str:
        """Return U+FFFD if the last character was never completed, else an empty string."""
        return self._utf8.decode(b"", True)


class StopMatcher:
    """Cuts a text at the first complete stop string, also across the borders of pieces.

    Text is held back while it may be the beginning of a stop string.

    Args:
        stops: the stop strings.
        include_stop: cut after the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.stop: str | None = None  # the string that was found

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self.stop is not None

    def push(self, text: str, watch: bool = True) -> str:
        """Return the text to deliver; after a stop string it is empty.

        A stop string counts only if it ends in a piece with `watch`.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        matches = [
            (at + len(stop), at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0
        ]
        if matches and watch:
            end, start, self.stop = min(matches)
            self._held = ""
            if self._include_stop:
                return pending[:end]
            return pending[:start]
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """Return the held text, for a request that ended without a stop string."""
        held = self._held
        self._held = ""
        return held


class OutputStream:
    """The text of one generated sequence, with decoding, end tokens and stop strings.

    `num_tokens` counts the ids of the sequence, including the end token. After a stop string, the further ids of the
    same update and their log probabilities do not belong to it. `finish_reason` is set at the end. If a stop string
    sets it, the engine still runs the request, and the caller must abort it. `stop_reason` is the stop string or the
    member of `stop_token_ids` at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        decodes: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens, decodes=decodes)
        self._matcher = StopMatcher(stops, include_stop)
        self._watches = bool(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @classmethod
    def for_params(cls, tokenizer: Tokenizer, params: SamplingParams) -> Self:
        """Make the stream of a request with these parameters."""
        return cls(
            tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            decodes=params.detokenize,
        )

    @property
    def stop(self) -> str | None:
        """The stop string at the end; None if the text ended otherwise, or has not ended."""
        return self._matcher.stop

    def push(self, ids: Sequence[int], finish_reason: FinishReason | None = None) -> str:
        """Add the ids of an update, and return the new text.

        With reason "stop" the last id is an end token. It is text only with `include_stop`.
        """
        if self.finish_reason is not None:
            return ""
        text_ids = ids[:-1] if finish_reason == "stop" else ids
        if not self._watches:
            self.num_tokens += len(text_ids)
            text = self._decoder.push(text_ids)
        else:
            text = self._push_watched(text_ids)
            if self._matcher.stopped:
                self.finish_reason = "stop"
                self.stop_reason = self._matcher.stop
                return text
        if finish_reason is not None:
            text += self._finish(ids[len(text_ids) :], finish_reason)
        return text

    def _push_watched(self, ids: Sequence[int]) -> str:
        # One by one, so that `num_tokens` counts up to the id that completes the stop string.
        pieces = []
        for token_id in ids:
            self.num_tokens += 1
            text = self._decoder.push((token_id,))
            pieces.append(self._matcher.push(text, watch=self.num_tokens > self._min_tokens))
            if self._matcher.stopped:
                break
        return "".join(pieces)

    def _finish(self, end_ids: Sequence[int], finish_reason: FinishReason) -> str:
        self.finish_reason = finish_reason
        self.num_tokens += len(end_ids)
        if end_ids and end_ids[-1] in self._stop_token_ids:
            self.stop_reason = end_ids[-1]
        shown = ""
        if self._include_stop:
            shown = self._decoder.push(end_ids)
        text = self._matcher.push(shown + self._decoder.finish(), watch=False)
        return text + self._matcher.finish()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` equal to a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
