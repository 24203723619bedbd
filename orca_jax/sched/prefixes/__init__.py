"""Beginnings of texts that several requests have: pages by content, their reuse, and pages outside of the KV cache."""
