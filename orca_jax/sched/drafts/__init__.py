"""Speculation: ids proposed for requests, and verified by the model in one iteration."""
