"""The host's copy of what each row holds between iterations. Plans bring only what changed."""

from collections.abc import Sequence

import numpy as np

from orca_jax.step import MAX_LOGIT_BIAS, MAX_STOP_IDS, Member, RowSampling

NO_ID = -1
"""Fills the places of stop ids that a request does not have."""


class RowTable:
    """Pages of each row, and the sampling parameters of its request; row `num_rows` stands for no request.

    That last row is neutral: greedy, without penalties or biases.
    """

    def __init__(self, num_rows: int, num_pages: int) -> None:
        rows = num_rows + 1
        self.num_rows = num_rows
        self.page_table = np.zeros((rows, num_pages), np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed_high = np.zeros(rows, np.int32)
        self.seed_low = np.zeros(rows, np.int32)
        self.presence = np.zeros(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.repetition = np.ones(rows, np.float32)
        self.num_prompt = np.zeros(rows, np.int32)
        self.bias_id = np.zeros((rows, MAX_LOGIT_BIAS), np.int32)
        self.bias = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        self.stop_ids = np.full((rows, MAX_STOP_IDS), NO_ID, np.int32)
        self.num_untold = np.zeros(rows, np.int32)  # tokens that are on the device and in no result
        self.has_extras = [False] * rows
        self.logprobs: list[int | None] = [None] * rows

    def update(self, members: Sequence[Member]) -> None:
        """Take in what a plan changes."""
        for member in members:
            if member.new_pages:
                first = member.num_old_pages
                self.page_table[member.row, first : first + len(member.new_pages)] = member.new_pages
            if member.sampling is not None:
                self._set_sampling(member.row, member.sampling)

    def _set_sampling(self, row: int, sampling: RowSampling) -> None:
        self.temperature[row], self.top_k[row] = sampling.temperature, sampling.top_k
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        high, low = divmod(sampling.seed % 2**64, 2**32)
        self.seed_high[row], self.seed_low[row] = np.array([high, low], np.uint32).view(np.int32)
        self.presence[row], self.frequency[row] = sampling.presence_penalty, sampling.frequency_penalty
        self.repetition[row], self.num_prompt[row] = sampling.repetition_penalty, sampling.num_prompt
        self.bias[row] = 0  # adds nothing to whatever id stands beside it
        for place, (token, bias) in enumerate(sampling.logit_bias):
            self.bias_id[row, place], self.bias[row, place] = token, bias
        stop_ids = sampling.stop_ids[:MAX_STOP_IDS]  # with more of them a request is never repeated on the device
        self.stop_ids[row, : len(stop_ids)], self.stop_ids[row, len(stop_ids) :] = stop_ids, NO_ID
        self.num_untold[row] = 0
        self.has_extras[row], self.logprobs[row] = sampling.has_extras, sampling.logprobs
