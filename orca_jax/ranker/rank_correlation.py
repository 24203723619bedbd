"""How well one order agrees with another."""

import numpy as np


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the opposite one, over pairs that either could decide.

    1 is the same order, -1 the reverse, 0 no connection, also where all values of one side are equal. It takes N^2
    steps and bytes. Both are [N].
    """
    upper = np.triu_indices(len(first), 1)
    one, other = (np.sign(np.subtract.outer(values, values)[upper]) for values in (first, second))
    decided = np.sqrt(np.sum(one != 0) * np.sum(other != 0), dtype=np.float64)
    return float(np.sum(one * other) / decided) if decided else 0.0
