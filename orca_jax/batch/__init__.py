"""Batch generation: a file of requests in, a file of answers out, and a run that survives its own death."""
