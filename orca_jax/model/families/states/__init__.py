"""Families whose layers keep states in place of pages."""
