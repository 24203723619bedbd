"""What an engine wrote down (`--trace-file`): shown, measured, and run again under another scheduler."""
