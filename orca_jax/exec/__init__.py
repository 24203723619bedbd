"""Execution: plans in, token ids out. This is about devices, shapes and programs, not about schedulers or text.

Shape letters: T tokens of the merged batch (padded to a bucket), R rows, P pages of a row, B width of a
sampler, K kept tokens, V padded vocabulary, H query heads, K KV heads, D head dim, S page size, L layers.
"""
