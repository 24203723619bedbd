"""Tiers of the KV cache outside of the devices: pages of prefixes in files and in the memory of the host."""
