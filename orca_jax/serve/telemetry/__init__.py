"""Metrics and spans of a running server."""
