"""GGUF files: the configuration in their metadata, and their weights. The library `gguf` knows their types."""
