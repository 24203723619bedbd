"""Speculation against none."""
