"""Attention on TPUs: one Mosaic kernel for increments and one for chunks of prompts."""
