"""Orders of requests for `chunked` (`--scheduling-policy`): one file for each, and their protocol in `base`."""
