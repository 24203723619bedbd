"""Reads GGUF files: their header. What the tensors and texts in it mean is in `model/gguf` and `text`."""
