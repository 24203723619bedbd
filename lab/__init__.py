"""Measurements of this project: the paper's evaluation, parts of the engine, other engines. It is not in the wheel."""
