"""Sampling on the device: from the logits of the rows that sample to their next tokens."""
