"""The ranges of the fields of requests, once for the engine, `LLM` and the APIs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

# most probable tokens that a request may ask for; a shape of the compiled sampler
MAX_LOGPROBS = 20
MAX_CANDIDATES = 128  # texts generated for one prompt
# ids that a request may bias or score; OpenAI's limit of biases, and a shape of the compiled sampler
MAX_LOGIT_BIAS = 300

MAX_PRIORITY = 100  # priorities lie between -100 and 100: the bound keeps requests from starving


class Range(NamedTuple):
    """The range of a numeric field. Both ends are included, unless `excludes_low`; infinity never is."""

    low: float
    high: float
    excludes_low: bool = False
    is_integer: bool = False
    wording: str = ""  # for error messages; empty: derived from the ends

    def has(self, value: object) -> bool:
        """True for a number in this range. A boolean is not a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        if self.excludes_low and value == self.low:
            return False
        return self.low <= value <= self.high and value != math.inf

    @property
    def text(self) -> str:
        """The range in words, for error messages."""
        if self.is_integer:
            return self.wording or f"an integer from {self.low} to {self.high}"
        begin = "(" if self.excludes_low else "["
        return self.wording or f"a number in {begin}{self.low}, {self.high}]"


# The only table of ranges. `SamplingParams`, `Urgency` and the fields of the API (`openai/schema`) are checked with it.
RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, excludes_low=True),
    "top_k": Range(-1, 2**31 - 1, is_integer=True, wording="an integer >= 1, or 0 (or -1) for all"),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**63 - 1, is_integer=True, wording="a 64-bit integer"),
    "n": Range(1, MAX_CANDIDATES, is_integer=True),
    "max_tokens": Range(1, math.inf, is_integer=True, wording="an integer >= 1"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    # for each bias
    "logit_bias": Range(-100, 100, wording="a map of ids to numbers in [-100, 100]"),
    "logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, is_integer=True),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY, is_integer=True),
    **dict.fromkeys(
        ("deadline", "ttft", "tpot"),
        Range(0, math.inf, excludes_low=True, wording="a number of seconds above 0"),
    ),
    "weight": Range(0, 1000, excludes_low=True),
}
# for each element of a list of ids
TOKEN_ID = Range(0, 2**31 - 1, is_integer=True, wording="token ids")
