"""Computing: plans in, token ids out. Knows devices, shapes and programs; knows neither schedulers nor text.

Shape letters: T tokens of the merged batch (padded to a bucket), R rows, P pages of a row, B places of a
sampler, K kept tokens, V padded vocabulary, H query heads, K KV heads, D head dim, S page size, L layers.
"""
