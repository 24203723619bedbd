"""The simulator beside recorded runs of GPUs, from measured times of kernels alone."""
