"""Pure functions on arrays: the per-request half of selective batching, and the pages of the KV cache.

Shape letters: T tokens of the merged batch, R rows, P pages of a row, N pages in all layers, S page size,
H query heads, K KV heads, G = H / K query heads for each KV head, D head dim.
"""
