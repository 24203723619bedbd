"""The clients of decisions."""
