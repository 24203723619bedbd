"""Workloads: arrivals and lengths of requests, from a file or drawn at random."""
