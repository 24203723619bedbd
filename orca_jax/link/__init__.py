"""The connection between the front end and the engine, whether the engine runs in a process or in a thread."""
