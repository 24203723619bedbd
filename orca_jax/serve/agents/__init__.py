"""The routes of the APIs that agents call by default."""
