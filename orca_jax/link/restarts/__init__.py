"""Engines and workers that are started again: the bound on failures, and the requests that outlive them."""
