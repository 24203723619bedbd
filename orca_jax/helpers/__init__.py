"""Helpers of all parts: files that come with the package, the console, logs, the hub, GGUF."""
