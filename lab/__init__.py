"""Measurements around the package: the reproduction of the paper's evaluation. It is not in the wheel."""
