"""Families with an MLP in each layer that are near to another family."""
