"""Decisions of all APIs: typed questions about a state, answered by the probabilities of labels."""
