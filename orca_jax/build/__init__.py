"""Construction: settings in, an engine out. The only part that resolves an "auto"."""
