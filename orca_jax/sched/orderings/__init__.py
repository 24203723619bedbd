"""In which order `chunked` considers requests (`--scheduling-policy`): a file for each, a protocol in `base`."""
