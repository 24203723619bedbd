"""The shelf's results: published schedulers on equal loads in virtual time, and each paper's own claim."""
