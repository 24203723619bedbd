"""Comparison with other engines: each runs a program in its own environment, in alternation with ours."""
