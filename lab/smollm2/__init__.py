"""The model smollm2: the choice of its default sampling, and a soak of a server with it."""
