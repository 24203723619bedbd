"""From ids to text while they arrive: never half a character, and nothing past a stop string."""

import codecs
from collections.abc import Sequence

from orca_jax.request import FinishReason
from orca_jax.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one request's ids as they come.

    The pieces joined, `finish()` included, equal `tokenizer.decode` of all ids. Bytes of an unfinished character wait
    for the next id; they are at most three.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids; may be empty."""
        spell, hidden = self._tokenizer.token_bytes, self._hidden
        return self._utf8.decode(b"".join(spell(i) for i in ids if i not in hidden))

    def finish(self) -> str:
        """What waited: U+FFFD where a character was never completed, else nothing."""
        return self._utf8.decode(b"", True)


class StopMatcher:
    """Cuts a text before the first stop string that becomes complete, wherever the pieces' borders fall.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may go out. Once `stopped` holds, nothing more comes."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        pending = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return pending[: min(matches)[1]]
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def finish(self) -> str:
        """The text that was held back, for a request that ended otherwise."""
        held, self._held = self._held, ""
        return held


class OutputStream:
    """The text of one generated sequence: decoding, end tokens and stop strings together.

    `num_tokens` counts the ids that the sequence used, its end token included. `finish_reason` is set at the end,
    also by a stop string, and then the caller has to abort the request, which the engine still runs.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stops)
        self._watches = bool(stops)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, ids: Sequence[int], finish_reason: FinishReason | None = None) -> str:
        """Take an update's ids and return the new text. With reason "stop" the last id is an end token: not text."""
        if self.finish_reason is not None:
            return ""
        text_ids = ids[:-1] if finish_reason == "stop" else ids
        if not self._watches:
            self.num_tokens += len(ids)
            text = self._decoder.push(text_ids)
        else:
            text = self._push_watched(text_ids)
            if self._matcher.stopped:
                self.finish_reason = "stop"
                return text
            self.num_tokens += len(ids) - len(text_ids)
        if finish_reason is not None:
            self.finish_reason = finish_reason
            text += self._matcher.push(self._decoder.finish()) + self._matcher.finish()
        return text

    def _push_watched(self, ids: Sequence[int]) -> str:
        # One by one, so that `num_tokens` ends at the id which completed the stop string.
        pieces = []
        for token_id in ids:
            self.num_tokens += 1
            pieces.append(self._matcher.push(self._decoder.push((token_id,))))
            if self._matcher.stopped:
                break
        return "".join(pieces)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
