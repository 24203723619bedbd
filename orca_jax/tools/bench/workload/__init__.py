"""Workloads: arrivals and lengths of requests, from a public trace or drawn at random."""
