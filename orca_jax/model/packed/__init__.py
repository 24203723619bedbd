"""Packed matrices of linear layers on CPUs: those of 16 and 32 bits, and those of few bits."""
