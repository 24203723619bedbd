"""Files of weights, which strangers write: their headers, their digests, and values that are not finite."""
