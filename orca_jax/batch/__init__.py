"""Batch generation: answers a file of requests, and resumes after a crash or a kill."""
