"""A benchmark of the server with many streaming clients."""
