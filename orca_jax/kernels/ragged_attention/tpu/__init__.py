"""Attention on TPUs: a Mosaic kernel for increments, and one for chunks of prompts."""
