"""Attention on Hopper GPUs, in Mosaic GPU: a kernel for increments, and one for chunks of prompts."""
