"""Families with experts that are near to another family."""
