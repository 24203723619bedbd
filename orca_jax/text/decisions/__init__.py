"""Typed questions about a state: their prompts, their labels, and the probabilities of their answers."""
