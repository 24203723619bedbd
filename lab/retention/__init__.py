"""Retentions of papers on equal loads in virtual time, beside the least recently used pages first and clairvoyance."""
