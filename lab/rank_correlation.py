"""Measures the agreement of two orders."""

import numpy as np


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Return Kendall's tau-b of two arrays [N].

    It is 1 for the same order, -1 for the reverse order, and 0 for unrelated orders, or if all values of one side are
    equal. Time and memory grow with N^2.
    """
    upper = np.triu_indices(len(first), 1)
    one, other = (np.sign(np.subtract.outer(values, values)[upper]) for values in (first, second))
    decided = np.sqrt(np.sum(one != 0) * np.sum(other != 0), dtype=np.float64)
    return float(np.sum(one * other) / decided) if decided else 0.0
