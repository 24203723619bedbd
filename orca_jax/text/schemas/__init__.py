"""JSON schemas as callers write them, made into schemas that a grammar enforces in full."""
