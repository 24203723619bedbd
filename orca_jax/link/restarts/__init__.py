"""Restarts of engines and workers: the bound on failures, and the requests of lost engines."""
