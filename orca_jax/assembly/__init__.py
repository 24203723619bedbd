"""Builds an engine from settings. This is the only part that resolves "auto"."""
