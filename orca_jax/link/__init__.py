"""The connection between the front end and an engine in a process or in a thread."""
