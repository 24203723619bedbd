"""Third-party clients and tools against the server: the runner, their environments, and the table of results."""
