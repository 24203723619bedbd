"""The command `timeline`: tables, charts and trace events of a timeline, and the cost that fits it."""
