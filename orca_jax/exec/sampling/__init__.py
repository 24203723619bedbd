"""Sampling on the device: the next tokens of sampling rows, from their logits."""
