"""Changes of a running engine that requests wait for."""
