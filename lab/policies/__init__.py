"""Schedulers for comparison only: no server has them."""
