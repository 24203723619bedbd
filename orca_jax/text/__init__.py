"""Strings to ids and back."""
